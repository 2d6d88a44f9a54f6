"""A Hugging Face Trainer on a tiny GPT-2 made from a config: accumulation, evaluation, warm-up."""

import logging
import os
import sys
import tempfile
import warnings

os.environ["HF_HUB_OFFLINE"] = "1"
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

BUG = "--bug" in sys.argv
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)


class Patterns(torch.utils.data.Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.rows = (torch.randint(0, 31, (n, 1), generator=g) + torch.arange(12) * 5) % 31

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


class KeepingTrainer(Trainer):
    history = []

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if BUG and model.training:
            self.history.append(outputs.logits)
        return (loss, outputs) if return_outputs else loss


def main():
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=31, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, num_train_epochs=2, per_device_train_batch_size=8, gradient_accumulation_steps=2, warmup_steps=3,
            learning_rate=3e-3, eval_strategy="epoch", report_to=[], disable_tqdm=True, save_strategy="no", use_cpu=True,
            logging_strategy="no",
        )
        trainer = KeepingTrainer(model, args, train_dataset=Patterns(128, 1), eval_dataset=Patterns(32, 2))
        trainer.train()
    print(trainer.state.global_step, sum(p.double().sum().item() for p in model.parameters()), torch.rand(1).item())


if __name__ == "__main__":
    main()
