# Twenty ordinary training loops, as people write them: of how many can the ranks be forks? (test_eligibility.py reads
# them and runs none.)

# %% minimal
import torch

model = torch.nn.Linear(10, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step in range(100):
    loss = model(torch.randn(8, 10)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

# %% ddp_tutorial
import os
import sys
import tempfile
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim
from torch.nn.parallel import DistributedDataParallel as DDP


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(10, 5)

    def forward(self, x):
        return self.net(x)


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["LOCAL_RANK"])
    model = DDP(ToyModel())
    optimizer = optim.SGD(model.parameters(), lr=0.001)
    for _ in range(10):
        optimizer.zero_grad()
        nn.MSELoss()(model(torch.randn(20, 10)), torch.randn(20, 5)).backward()
        optimizer.step()
    if rank == 0:
        path = os.path.join(tempfile.gettempdir(), "model.pt")
        torch.save(model.state_dict(), path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# %% imagenet_example
import argparse
import os
import random
import shutil
import time
import warnings
from enum import Enum

import torch
import torch.backends.cudnn as cudnn
import torch.nn as nn
import torchvision.models as models
import torchvision.transforms as transforms

parser = argparse.ArgumentParser(description="ImageNet")
parser.add_argument("data", nargs="?", default="imagenet")
parser.add_argument("--seed", default=None, type=int)


def main():
    args = parser.parse_args()
    if args.seed is not None:
        random.seed(args.seed)
        torch.manual_seed(args.seed)
        cudnn.deterministic = True
        warnings.warn("You have chosen to seed training.")
    model = models.resnet18()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for epoch in range(90):
        started = time.time()
        loss = nn.CrossEntropyLoss()(model(torch.randn(2, 3, 224, 224)), torch.tensor([0, 1]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.save(model.state_dict(), "checkpoint.pth.tar")
        shutil.copyfile("checkpoint.pth.tar", "best.pth.tar")


if __name__ == "__main__":
    main()

# %% settings_by_exec
import math
import os
import pickle
import time
from contextlib import nullcontext

import numpy as np
import torch

batch_size = 12
config_keys = [k for k, v in globals().items() if not k.startswith("_") and isinstance(v, (int, float, bool, str))]
exec(open("configurator.py").read())
config = {k: globals()[k] for k in config_keys}
for step in range(10):
    X = torch.from_numpy(np.random.randint(0, 9, (batch_size, 4)))

# %% trainer_script
import logging
import math
import os
import sys
from dataclasses import dataclass, field
from itertools import chain
from typing import Optional

import datasets
import evaluate
import torch
import transformers
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, Trainer, TrainingArguments, set_seed
from transformers.utils import check_min_version

check_min_version("4.40.0")
logger = logging.getLogger(__name__)


@dataclass
class ModelArguments:
    model_name_or_path: Optional[str] = field(default=None, metadata={"help": "The checkpoint."})


def main():
    parser = HfArgumentParser((ModelArguments, TrainingArguments))
    if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
        model_args, training_args = parser.parse_json_file(json_file=os.path.abspath(sys.argv[1]))
    else:
        model_args, training_args = parser.parse_args_into_dataclasses()
    logging.basicConfig(handlers=[logging.StreamHandler(sys.stdout)])
    set_seed(training_args.seed)
    trainer = Trainer(model=AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path), args=training_args)
    trainer.train(resume_from_checkpoint=None)


if __name__ == "__main__":
    main()

# %% accelerate_example
import argparse

import evaluate
import torch
from accelerate import Accelerator, DistributedType
from datasets import load_dataset
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_linear_schedule_with_warmup, set_seed

MAX_GPU_BATCH_SIZE = 16


def training_function(config, args):
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    model = AutoModelForSequenceClassification.from_pretrained("bert-base-cased", return_dict=True)
    optimizer = AdamW(params=model.parameters(), lr=config["lr"])
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in []:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    training_function({"lr": 2e-5}, parser.parse_args())

# %% lightning_module
import os
import lightning as L
import torch
import torch.nn.functional as F
from torch import nn, utils


class LitAutoEncoder(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(28 * 28, 3)
        self.decoder = nn.Linear(3, 28 * 28)

    def training_step(self, batch, batch_idx):
        x = batch[0].view(batch[0].size(0), -1)
        return F.mse_loss(self.decoder(self.encoder(x)), x)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


data = utils.data.TensorDataset(torch.randn(64, 1, 28, 28))
L.Trainer(max_epochs=1).fit(LitAutoEncoder(), utils.data.DataLoader(data))

# %% device_chosen_before_torch
import os

os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np
import torch
from tqdm import tqdm

np.random.seed(0)
torch.manual_seed(0)
for step in tqdm(range(10)):
    torch.randn(2).sum()

# %% allocator_chosen_before_torch
import os

os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
import torch

for step in range(10):
    torch.randn(2).sum()

# %% helper_packages
import json
import random
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import wandb
import yaml
from PIL import Image
from sklearn.metrics import f1_score
from torch.utils.tensorboard import SummaryWriter

SEED = 42


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.backends.cudnn.benchmark = False


def main():
    seed_everything(SEED)
    config = yaml.safe_load(Path("config.yaml").read_text())
    writer = SummaryWriter()
    wandb.init(mode="offline", config=config)
    for epoch in range(config["epochs"]):
        writer.add_scalar("f1", f1_score([0, 1], [0, 1]), epoch)
    pd.DataFrame({"x": [1]}).to_csv("history.csv")
    plt.savefig("loss.png")


if __name__ == "__main__":
    main()

# %% path_to_the_repository
import os
import sys

sys.path.append(os.path.join(os.path.dirname(__file__), ".."))

import torch

print(torch.__version__)

# %% hydra_application
import hydra
import torch
from omegaconf import DictConfig


@hydra.main(config_path=None, version_base=None)
def main(config: DictConfig):
    torch.manual_seed(0)


if __name__ == "__main__":
    main()

# %% torchrun_with_signal_handler
import signal
import sys
import time

import torch
import torch.distributed as dist

stop = False


def on_term(signum, frame):
    global stop
    stop = True


def main():
    signal.signal(signal.SIGTERM, on_term)
    dist.init_process_group()
    while not stop:
        time.sleep(1)
    torch.save({}, "last.pt")
    sys.exit(0)


if __name__ == "__main__":
    main()

# %% open_files_raised
import resource

import torch
import torch.multiprocessing

torch.multiprocessing.set_sharing_strategy("file_system")
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
for batch in torch.utils.data.DataLoader(torch.arange(10), num_workers=2):
    print(batch)

# %% memory_logged
import gc
import os

import psutil
import torch


def memory():
    return psutil.Process(os.getpid()).memory_info().rss / 1e9


for step in range(10):
    gc.collect()
    print(memory(), torch.cuda.memory_allocated())

# %% gan
from __future__ import print_function
import argparse
import os
import random
import torch
import torch.nn as nn
import torch.nn.parallel
import torch.optim as optim
import torch.utils.data
import torchvision.datasets as dset
import torchvision.utils as vutils

parser = argparse.ArgumentParser()
parser.add_argument("--outf", default=".", help="folder to output images and model checkpoints")
opt = parser.parse_args()
try:
    os.makedirs(opt.outf)
except OSError:
    pass
random.seed(1)
netD, netG = nn.Linear(4, 1), nn.Linear(2, 4)
optimizerD, optimizerG = optim.Adam(netD.parameters()), optim.Adam(netG.parameters())
for i in range(3):
    netD.zero_grad()
    netD(netG(torch.randn(8, 2)).detach()).mean().backward()
    optimizerD.step()
    netG.zero_grad()
    netD(netG(torch.randn(8, 2))).mean().backward()
    optimizerG.step()

# %% models_by_name
import argparse
import importlib

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="resnet")
args = parser.parse_args()
model = importlib.import_module("models." + args.model).build()
for step in range(3):
    model(torch.randn(2, 3))

# %% fsdp_example
import functools
import os
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers.models.t5.modeling_t5 import T5Block


def setup():
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def fsdp_main():
    setup()
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={T5Block})
    model = FSDP(torch.nn.Linear(2, 2), auto_wrap_policy=policy)
    started = time.perf_counter()
    model(torch.ones(1, 2)).sum().backward()
    print(time.perf_counter() - started)


if __name__ == "__main__":
    fsdp_main()

# %% threads_set_first
import os

os.environ["OMP_NUM_THREADS"] = "4"
os.environ.setdefault("MKL_NUM_THREADS", "4")
import torch

torch.set_num_threads(4)

# %% rl_loop
import argparse
from collections import deque, namedtuple
from itertools import count

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical

SavedAction = namedtuple("SavedAction", ["log_prob", "value"])
memory = deque(maxlen=100)
policy = nn.Linear(4, 2)
optimizer = torch.optim.Adam(policy.parameters(), lr=3e-2)
for episode in count(1):
    action = Categorical(F.softmax(policy(torch.randn(4)), dim=-1)).sample()
    loss = -action.float().mean() + policy(torch.ones(4)).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if episode > 3:
        break
