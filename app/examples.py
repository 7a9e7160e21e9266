"""Example prompts, each chosen because its tokens differ in how deep they need the model to think."""

EXAMPLES = [
    (
        "Word problem",
        "A baker has 12 trays with 7 rolls each. She sells half of them and eats two. How many are left? Think in steps.",
    ),
    (
        "Copy a list",
        "Repeat this list in capital letters, one word per line: apple, river, stone, cloud, apple, river, stone.",
    ),
    (
        "Small poem",
        "Write a four-line poem about a river that finds a shorter way to the sea.",
    ),
    (
        "Code",
        "Write a Python function fib(n) that returns the n-th Fibonacci number with a loop. Only the code.",
    ),
    (
        "Languages and emoji",
        "Say good morning in French, German, Spanish, Chinese and Japanese, and put a 🌊 after each line.",
    ),
]
"""Pairs of (short label, prompt)."""
