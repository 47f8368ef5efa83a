"""The questions of the training dialogues, as people ask them.

{w} is the word, {n} the word with its article or `to`.
"""

DEFINE = (
    "What is {n}?",
    "What is {n}?",
    "What's {n}?",
    "What does {w} mean?",
    "What does the word {w} mean?",
    "Define {w}.",
    "What is the meaning of {w}?",
    "Tell me what {n} is.",
    "Can you tell me what {w} means?",
    "Explain {w}.",
    "{w}?",
    "Give me a definition of {w}.",
    "What do you mean by {w}?",
    "Please define the word {w}.",
    "I do not know the word {w}. What does it mean?",
    "In a few words, what is {n}?",
    "Explain {w} to a five-year-old.",
)
USE = (
    "Use {w} in a sentence.",
    "Give me an example of {w}.",
    "Write a sentence with the word {w}.",
    "How is the word {w} used?",
    "Show me how to use {w}.",
    "Can you use {w} in a sentence?",
    "Give me an example sentence with {w}.",
)
ANOTHER = (
    "Give me another word for {w}.",
    "What is another word for {w}?",
    "What is a synonym of {w}?",
    "Which word means the same as {w}?",
    "How else can I say {w}?",
    "Find a synonym for {w}.",
)
OPPOSITE = (
    "What is the opposite of {w}?",
    "Give me the opposite of {w}.",
    "What is an antonym of {w}?",
    "Which word means the contrary of {w}?",
)
KIND = ("What kind of thing is {n}?", "What kind of thing is {w}?", "What sort of thing is {n}?")
KINDS = (
    "Name some kinds of {w}.",
    "What kinds of {w} are there?",
    "Give me some examples of {w}.",
    "List a few kinds of {w}.",
    "Which kinds of {w} do you know?",
)
PARTS = (
    "What are the parts of {n}?",
    "What does {n} consist of?",
    "Name the parts of {n}.",
    "What parts does {n} have?",
)
ABOUT = (
    "Tell me about {w}.",
    "Tell me about {n}.",
    "Tell me more about {w}.",
    "What do you know about {w}?",
    "Explain {w} in detail.",
    "Write about {w}.",
    "Write a few sentences about {w}.",
    "Write a short text about {w}.",
    "Describe {n}.",
    "Tell me everything about {w}.",
    "What can you tell me about {w}?",
    "Write an essay about {w}.",
    "Tell me a story about {w}.",
    "Write a paragraph on {w}.",
    "Help me understand {w}.",
    "Explain in detail what {n} is.",
)
VERSE = (
    "Write a haiku about {w}.",
    "Write a poem about {w}.",
    "Write a short poem about {n}.",
    "Give me a poem about {w}.",
    "Write three lines about {w}.",
)
# About a noun and what it is like or does: {v} a verb, {j} an adjective, {m} another noun.
OPEN_ADJECTIVE = (
    "Why is the {w} {j}?",
    "Why is {n} {j}?",
    "Is the {w} {j}?",
    "Can {n} be {j}?",
    "When is {n} {j}?",
    "What makes {n} {j}?",
    "Is {w} {j}?",
)
OPEN_VERB = (
    "How do I {v} {n}?",
    "How can I {v} the {w}?",
    "Can I {v} {n}?",
    "Should I {v} the {w}?",
    "Who can {v} {n}?",
    "Why do people {v} {w}?",
    "How does {n} {v}?",
    "How to {v} {w}?",
    "Do you {v} {w}?",
    "When should I {v} my {w}?",
)
OPEN_NOUN = (
    "What is the difference between {n} and {m}?",
    "Compare {n} and {m}.",
    "How is {n} like {m}?",
    "Which is better, {n} or {m}?",
    "What is the {w} of the {o}?",
    "What has {n} to do with {m}?",
    "{w} or {o}?",
)
# About the word of the turn before.
AGAIN = {
    "use": (
        "Use it in a sentence.",
        "Give me an example.",
        "For example?",
        "Can you give me an example?",
    ),
    "another": ("Give me another word for it.", "Is there another word for it?", "And a synonym?"),
    "opposite": ("What is its opposite?", "And the opposite?"),
    "kind": ("What kind of thing is it?",),
    "kinds": ("What kinds of it are there?", "Name some kinds of it."),
    "parts": ("What are its parts?", "What parts does it have?"),
    "others": (
        "What else can it mean?",
        "Does it have another meaning?",
        "Tell me more.",
        "And what else?",
        "Go on.",
    ),
}
SUMMARISE = (
    "Summarise this: {t}",
    "Summarize this: {t}",
    "Summarise the following text.\n\n{t}",
    "Summarize the following text.\n\n{t}",
    "{t}\n\nSummarise this.",
    "{t}\n\nWhat does this say?",
    "In one sentence, what does this say?\n\n{t}",
    "Give me a summary of this text:\n\n{t}",
    "TL;DR: {t}",
    "{t}\n\nGive me the gist.",
    "What is the main point of this?\n\n{t}",
    "Shorten this: {t}",
)
PAGE = (
    "Tell me about {t}.",
    "What does the documentation say about {t}?",
    "Explain {t}.",
    "What should I know about {t}?",
    "Write about {t} in SQLite.",
    "SQLite: {t}",
    "Describe {t} in some detail.",
)
SYSTEM = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "Answer briefly.",
    "You explain words.",
    "You are a dictionary that talks.",
    "Be helpful and concise.",
    "You are a friendly assistant. Answer in full sentences.",
    "You are Slackline's small model.",
)
# Small talk: questions with an answer each may have.
TALK = (
    (
        (
            "Hello!",
            "Hi",
            "Hello",
            "Hi there!",
            "Good morning.",
            "Hey",
            "Good evening!",
            "Greetings.",
        ),
        (
            "Hello! Which word shall I explain?",
            "Hello! Ask me what a word means.",
            "Hi! Give me a word, and I will say what it means.",
        ),
    ),
    (
        ("How are you?", "How are you today?", "How is it going?", "Are you well?"),
        (
            "I am well, thank you. Which word shall I explain?",
            "Very well, thank you. Ask me about a word.",
        ),
    ),
    (
        (
            "Who are you?",
            "What are you?",
            "Tell me about yourself.",
            "What is your name?",
            "Are you a robot?",
            "Introduce yourself.",
        ),
        (
            (
                "I am a small language model. "
                "I learned from a dictionary, and I can say what words mean."
            ),
            (
                "I am Slackline's small model. "
                "I have read a dictionary and the documentation of a database, and nothing else."
            ),
        ),
    ),
    (
        (
            "What can you do?",
            "What do you know?",
            "How can you help me?",
            "Help",
            "Can you help me?",
            "What can I ask you?",
        ),
        (
            (
                "I can explain a word, use it in a sentence, or find another word for it. "
                "Ask me what a lantern is."
            ),
            (
                "Ask me what a word means, for its opposite, or for an example. "
                "I can also shorten a text."
            ),
        ),
    ),
    (
        ("Thank you.", "Thanks!", "Thanks a lot.", "Great, thank you!", "Thank you very much."),
        ("You are welcome.", "You are welcome! Is there another word?", "With pleasure."),
    ),
    (
        ("Goodbye.", "Bye!", "See you later.", "That is all.", "Good night."),
        ("Goodbye!", "Goodbye, and come back with more words."),
    ),
    (
        ("Tell me a joke.", "Make me laugh.", "Do you know a joke?"),
        (
            (
                "A dictionary and a database walk into a bar. "
                "The dictionary knows the words, and the database has a table."
            ),
        ),
    ),
    (
        ("Are you sure?", "Is that true?", "Really?"),
        (
            "I am a small model: please look it up in a real dictionary.",
            "Not quite. I often make things up.",
        ),
    ),
)
