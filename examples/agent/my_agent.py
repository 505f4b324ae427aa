import json
import sys

from openai import OpenAI

prompt = json.load(sys.stdin)
answer = OpenAI().chat.completions.create(model="policy", messages=prompt["messages"])
print(json.dumps({"reward": float(prompt["row"]["answer"] in answer.choices[0].message.content)}))
