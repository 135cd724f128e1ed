"""The frozen base of LoRA in 4 bits (QLoRA, bitsandbytes), whole on every rank, or sharded by FSDP."""
# goes with: single, ddp, zero1, zero2, fsdp

# %% base
import torch
from transformers import BitsAndBytesConfig
from transformers.utils import is_bitsandbytes_available


def base_arguments(parser):
    parser.add_argument("--four-bit", action="store_true", help="read the weights of --model as 4-bit NF4")


def base_options(args):
    """How from_pretrained loads the model: in 4 bits in host memory, from which `placed` moves it, for FSDP block by
    block. FSDP2 gathers the packed weights as the bytes that they are: stored as bfloat16, as FSDP1 needs them, some
    would look like NaN, and a GPU's copies do not keep the bits of NaN."""
    if not args.four_bit:
        return {}
    if "lora_rank" not in args:
        raise SystemExit("--four-bit needs the extra lora: 4-bit weights are not trained themselves")
    if not is_bitsandbytes_available():
        raise SystemExit("--four-bit needs bitsandbytes: pip install bitsandbytes")
    import bitsandbytes

    bitsandbytes.nn.modules.has_avx512bf16 = lambda: False  # or a CPU repacks the weights at the first evaluation
    compute_in = torch.float32
    # with precision instead: compute_in = half_of(args) or torch.float32
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute_in)
    return {"quantization_config": config, "device_map": {"": "cpu"}}
