from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    epochs: int = 3
    lr: float = 5e-3
    batch: int = 8
    bug: bool = False
