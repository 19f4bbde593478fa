"""A LightningModule whose steps split their batch into parts that fit in memory."""

import lightning as L  # noqa: N812 - as its own documents write it
import torch
from torch import nn

from workers import ElasticStep


class Net(L.LightningModule):
    def __init__(self, dropout=0.1):
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3))
        self.resumed = None

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]

    def on_train_start(self):
        # Not their `.optimizer`: the Trainer would not count its steps.
        self.elastic = ElasticStep(self, self.optimizers(), clip=1.0)
        if self.resumed is not None:
            self.elastic.load_state_dict(self.resumed)

    def loss_of(self, part):
        inputs, classes = part
        return nn.functional.cross_entropy(self.net(inputs), classes)

    def training_step(self, batch, _):
        self.log("loss", self.elastic.step(batch, self.loss_of))
        self.lr_schedulers().step()

    def on_save_checkpoint(self, checkpoint):
        checkpoint["elastic"] = self.elastic.state_dict()

    def on_load_checkpoint(self, checkpoint):
        self.resumed = checkpoint["elastic"]


def batches():
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(48, 8, generator=draw)
    classes = inputs[:, :3].argmax(1)
    data = torch.utils.data.TensorDataset(inputs, classes)
    return torch.utils.data.DataLoader(data, batch_size=12)


if __name__ == "__main__":
    torch.manual_seed(0)
    trainer = L.Trainer(max_epochs=2, accelerator="auto", devices=1, logger=False)
    trainer.fit(Net(), batches())
    print(trainer.global_step, float(trainer.callback_metrics["loss"]))
