"""The demo's prompts: completions, since the model is a base model; half of them share a long prefix."""

from pathlib import Path

# Instructions of a few hundred tokens, then a page of about a thousand: longer than the model's window.
INSTRUCTIONS, PAGE = (Path(__file__).parent / "page.txt").read_text(encoding="utf-8").split("\n", 1)

LETTER = "A LETTER\n\nThe barque Corinna sails on Monday for Lisbon with a cargo of tea.\n"

QUESTIONS = (
    "How high is the tower, and who built it?",
    "What did the keepers eat in the winter of 1855?",
    "What was the boat called, and how many oars pulled her?",
    "Why is there a piano in the tower?",
    "How was the steamer Alder saved?",
)

SHORT = (
    "The capital of France is",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "English: Good morning. French: Bonjour.\nEnglish: Thank you. French: Merci.\nEnglish: Where is it? French:",
    "Once upon a time, in a village between the mountains and the sea, there lived a clockmaker who could not tell the",
    "Tomato soup, for four people.\n\nYou need:\n- 1 kg of ripe tomatoes\n- 2 onions\n- olive oil\n\nMethod:\n1.",
    "Water boils at a lower temperature on a high mountain because",
)


def demo_prompts(count: int) -> list[str]:
    """`count` prompts: questions on one page and on another with the same instructions, between short ones."""
    pages = [(PAGE, question) for question in QUESTIONS] + [(LETTER, "What is her cargo?")]
    asked = [f"{INSTRUCTIONS}\n\n{page}\nQuestion: {question}\nAnswer:" for page, question in pages]
    prompts = [prompt for pair in zip(asked, SHORT, strict=True) for prompt in pair]
    return [prompts[i % len(prompts)] for i in range(count)]
