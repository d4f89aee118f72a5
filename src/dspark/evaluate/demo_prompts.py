"""Prompts of the demo and the default benchmark: eight of each domain, written for this project."""

from __future__ import annotations

PROMPTS: dict[str, tuple[str, ...]] = {
    "math": (
        "A market stall sells apples at 3 for 2 dollars. Nora buys 18 apples and pays with a 20 dollar note. "
        "How much change does she get? Explain each step.",
        "A train leaves at 9:15 and travels 210 kilometres at 84 kilometres per hour. At what time does it arrive?",
        "Solve the equation 5x - 7 = 3x + 15 and check your answer.",
        "A tank holds 240 litres. One pipe fills it at 12 litres a minute while a leak loses 4 litres a minute. "
        "How long does it take to fill the empty tank?",
        "The sides of a rectangle are in the ratio 3 to 4 and its perimeter is 56 metres. What is its area?",
        "Omar reads 15 pages on Monday and each day 5 pages more than the day before. How many pages has he read by "
        "the end of Friday?",
        "What is 15 percent of 480, and which number is 480 fifteen percent of? Show your work.",
        "A bakery made 96 rolls. It sold a third of them in the morning and half of the rest in the afternoon. How "
        "many were left in the evening?",
    ),
    "code": (
        "Write a Python function that returns the n largest values of a list without sorting the whole list.",
        "Write a Python class for a bank account with methods to deposit, withdraw and show the balance.",
        "Write a Python function that counts how often each word occurs in a text file.",
        "Write a JavaScript function that removes duplicate values from an array and keeps their order.",
        "Explain what a binary search does and implement it in Python.",
        "Write a SQL query that lists each customer's name with the total of their orders, the largest total first.",
        "Write a Python function that checks whether two strings are anagrams, with a few test cases.",
        "Write a C program that reads ten integers and prints their average.",
    ),
    "chat": (
        "My houseplant has yellow leaves. What might be wrong, and what should I do about it?",
        "Write a short, friendly email that moves a meeting from Tuesday to Thursday.",
        "Explain to a ten-year-old why the moon changes its shape.",
        "I have two days in a seaside town in autumn. What would you suggest I do?",
        "Give me five ideas for a quick vegetarian dinner.",
        "What are the advantages and disadvantages of working from home?",
        "Tell me a short story about a lighthouse keeper who finds a message in a bottle.",
        "How can I get better at remembering people's names?",
    ),
}

DEMO_PER_DOMAIN = 2
"""The demo takes the first prompts of each domain: a mixture short enough to watch."""
