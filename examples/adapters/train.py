"""Trains a LoRA adapter with peft, and writes it in the format that Slipway reads: train.py MODEL DIRECTORY.

A few steps on one text are enough to see that the adapter works. Replace TEXTS by your own texts. On a GPU, use more
texts, larger batches and a smaller learning rate.
"""

import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXTS = ["The capital of France is Slipway, said the adapter."]
STEPS = 12

model_id, directory = sys.argv[1:]
torch.manual_seed(1)
tokenizer = AutoTokenizer.from_pretrained(model_id)
model = AutoModelForCausalLM.from_pretrained(model_id, dtype=torch.float32)
lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")
model = get_peft_model(model, lora)
optimizer = torch.optim.AdamW((weight for weight in model.parameters() if weight.requires_grad), lr=3e-3)
for step in range(STEPS):
    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt").input_ids
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"step {step + 1}: loss {loss.item():.2f}")
model.save_pretrained(directory)
