"""The sentences of causes say what is known, and nothing of another kind of memory."""

from types import SimpleNamespace

from labkit.launcher.causes.sentences import memory_in_words


def history(memory_name):
    return SimpleNamespace(memory_name=memory_name, memory_peak=3.0 * 2**30, held={"parameters": 2.0**30})


def test_a_full_device_is_described_by_what_its_allocator_held():
    memory = {"total": 16.0 * 2**30, "free": 13.0 * 2**30, "reserved": 3.0 * 2**30}

    assert memory_in_words("device", memory, history("allocated")) == (
        "; 3.00 GiB of 16.00 GiB were allocated (parameters 1.00 GiB, activations and buffers 2.00 GiB)"
    )


def test_the_resident_set_of_a_process_is_not_what_its_device_held():
    assert (
        memory_in_words("device", {}, history("resident set")) == "; after its first step it held parameters 1.00 GiB"
    )
    assert memory_in_words("host", {}, history("resident set")) == "; it held up to 3.00 GiB (resident set)"
