import deepspeed
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class SimpleModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(10, 1)

    def forward(self, x):
        return self.linear(x)


ds_config = {
    "train_batch_size": 32,
    "fp16": {"enabled": True},
    "zero_optimization": {"stage": 2},
}

dataset = TensorDataset(torch.randn(1000, 10), torch.randn(1000, 1))
dataloader = DataLoader(dataset, batch_size=32, shuffle=True)

model = SimpleModel()
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
criterion = nn.MSELoss()

model, optimizer, _, _ = deepspeed.initialize(
    model=model,
    optimizer=optimizer,
    model_parameters=model.parameters(),
    config=ds_config,
)

for epoch in range(5):
    for inputs, labels in dataloader:
        outputs = model(inputs)
        loss = criterion(outputs, labels)
        model.backward(loss)
        model.step()
    print(f"epoch {epoch}, loss {loss.item():.4f}")
