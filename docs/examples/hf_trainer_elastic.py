"""The same, with batches that are split into parts that fit in memory."""

import json
from pathlib import Path

import transformers as hf

from workers.hf import ElasticMixin

tokenizer = hf.AutoTokenizer.from_pretrained("model")
model = hf.AutoModelForCausalLM.from_pretrained("model", attn_pdrop=0.0)
lines = map(json.loads, Path("lines.jsonl").read_text().splitlines())
samples = [tokenizer(line["text"], truncation=True, max_length=32) for line in lines]
collator = hf.DataCollatorForLanguageModeling(tokenizer, mlm=False)
arguments = hf.TrainingArguments("out", per_device_train_batch_size=16, max_steps=8)
ElasticTrainer = type("ElasticTrainer", (ElasticMixin, hf.Trainer), {})
trainer = ElasticTrainer(model, arguments, collator, samples)
print(trainer.train().training_loss)
