# Frameworks that are not among labkit's own packages: pip install keras fastai hydra-core deepspeed

# %% keras_on_torch
# needs keras
# env KERAS_BACKEND=torch TF_CPP_MIN_LOG_LEVEL=3
import keras, numpy as np
keras.utils.set_random_seed(0)
x = np.random.rand(64, 4).astype("float32"); y = x.sum(1)
m = keras.Sequential([keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)]); m.compile("sgd", "mse")
h = m.fit(x, y, batch_size=16, epochs=2, verbose=0); print(h.history["loss"]); m.save_weights("w.weights.h5")

# %% fastai_learner
# needs fastai
import torch
from fastai.vision.all import *
from fastai.data.core import DataLoaders
torch.manual_seed(0); x = torch.rand(64, 4); ds = list(zip(x, x.sum(1, keepdim=True)))
dls = DataLoaders(DataLoader(ds, bs=16), DataLoader(ds, bs=16))
learn = Learner(dls, nn.Linear(4, 1), loss_func=nn.MSELoss(), opt_func=SGD, cbs=[CSVLogger()])
with learn.no_bar(), learn.no_logging(): learn.fit(2, .1)
print(learn.recorder.losses[-1].item()); learn.save("model")

# %% hydra_main
# needs hydra
# args model.width=8 +extra=1
import hydra, torch
from omegaconf import DictConfig, OmegaConf
@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg: DictConfig):
    import logging, os; logging.getLogger(__name__).info("in %s", os.path.basename(os.getcwd()))
    print(OmegaConf.to_yaml(cfg)); m = torch.nn.Linear(cfg.model.width, 1); o = torch.optim.SGD(m.parameters(), lr=cfg.lr)
    for _ in range(3): m(torch.ones(2, cfg.model.width)).sum().backward(); o.step()
if __name__ == "__main__": main()
# %% hydra_main: conf/config.yaml
lr: 0.1
model:
  width: 4
hydra:
  run:
    dir: out

# %% deepspeed_zero
# needs deepspeed
# env DS_ACCELERATOR=cpu
# ranks 2
import torch, deepspeed, os
torch.manual_seed(0); m = torch.nn.Linear(8, 1)
e, o, _, _ = deepspeed.initialize(model=m, model_parameters=m.parameters(), dist_init_required=True, config={"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}, "optimizer": {"type": "SGD", "params": {"lr": .1}}, "zero_allow_untested_optimizer": True})
for _ in range(3):
    l = e(torch.ones(4, 8)).pow(2).mean(); e.backward(l); e.step(); e.local_rank or print(round(l.item(), 4))
e.save_checkpoint("ck", tag="t")
