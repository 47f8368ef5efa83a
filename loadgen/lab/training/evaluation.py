"""The evaluation of a trained model for its card: losses, endings and samples."""

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from loadgen.lab.training import folder, measures
from loadgen.lab.training.byte_pairs import IM_END
from loadgen.lab.training.corpus import Corpus
from loadgen.lab.training.measures import ANSWER_TOKENS, Endings, Loss

PROMPTS = (
    "What is a river?",
    "What does it mean to wander?",
    "Use the word remember in a sentence.",
    "What is the opposite of hot?",
    "Why is the sky blue?",
    "Tell me about the horse.",
    "Write a haiku about snow.",
    "Who are you?",
)
TEMPERATURE = 0.5  # of the samples


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The figures of one model."""

    losses: dict[str, Loss]  # by the texts that they were measured on
    endings: Endings
    samples: list[tuple[str, str]]  # (question, answer)
    parameters: int
    megabytes: float


def evaluate(
    path: Path, tokenizer: Tokenizer, seen: Corpus, held: Corpus, *, documents: int
) -> Evaluation:
    """Evaluates the model in a folder, as saved."""
    model = folder.read(path)
    texts = {
        "dialogues about words it was trained on, newly drawn": measures.dialogues(
            seen, 902, documents
        ),
        "dialogues about words and pages it was never trained on": measures.dialogues(
            held, 903, documents
        ),
        "prose of pages it was never trained on": measures.prose(held, 904, max(1, documents // 8)),
    }
    losses = {name: measures.loss(model, tokenizer, drawn) for name, drawn in texts.items()}
    prompts = measures.questions(measures.dialogues(seen, 905, max(1, documents // 4)))
    chats = [f"<|im_start|>user\n{question}{IM_END}\n{measures.ASSISTANT}" for question in PROMPTS]
    answers = measures.answers(
        model, tokenizer, chats, tokens=ANSWER_TOKENS, temperature=TEMPERATURE, seed=7
    )
    samples = [
        (question, tokenizer.decode(answer).strip())
        for question, (_, answer) in zip(PROMPTS, answers, strict=True)
    ]
    megabytes = sum(file.stat().st_size for file in path.iterdir()) / 1e6
    endings = measures.endings(model, tokenizer, prompts)
    parameters = sum(tensor.numel() for tensor in model.parameters())
    return Evaluation(losses, endings, samples, parameters, megabytes)
