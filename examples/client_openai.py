"""Ask a running server with the OpenAI client, streaming and not. Start one first: ``make serve``."""

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "What is gravity?"}]

answer = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=64)
print(answer.choices[0].message.content)

for chunk in client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=64, stream=True):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
