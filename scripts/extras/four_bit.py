"""The frozen base of LoRA in 4 bits (QLoRA, bitsandbytes), whole on every rank."""
# goes with: single, ddp, zero1

# %% base
import torch
from transformers import BitsAndBytesConfig
from transformers.utils import is_bitsandbytes_available


def base_arguments(parser):
    parser.add_argument("--four-bit", action="store_true", help="read the weights of --model as 4-bit NF4")


def base_options(args):
    """How from_pretrained loads the model: onto this rank's device, where it stays."""
    if not args.four_bit:
        return {}
    if "lora_rank" not in args:
        raise SystemExit("--four-bit needs the extra lora: 4-bit weights are not trained themselves")
    if not is_bitsandbytes_available():
        raise SystemExit("--four-bit needs bitsandbytes: pip install bitsandbytes")
    if not torch.cuda.is_available():
        raise SystemExit("--four-bit needs a GPU: on a CPU bitsandbytes repacks the weights at the first evaluation")
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=half_of(args) or torch.float32
    )
    return {"quantization_config": config, "device_map": {"": torch.cuda.current_device()}}
