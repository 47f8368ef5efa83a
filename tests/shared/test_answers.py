"""Tests of the answers to offers and holds: one type for each, which JSON tools can read."""

import msgspec
import pytest

from shared.bus import codec
from shared.errors import PeerError
from shared.schemas import (
    HoldAnswer,
    OfferAccepted,
    OfferAnswer,
    OfferDeclined,
    OfferInDoubt,
    OfferNotReady,
)

ANSWERS = {
    OfferAnswer: {
        OfferAccepted(): "accepted",
        OfferDeclined(reason="no room", earliest_s=1.5): "declined",
        OfferNotReady(reason="resync"): "not_ready",
        OfferInDoubt(reason="timeout"): "in_doubt",
    },
    HoldAnswer: {
        OfferAccepted(): "accepted",
        OfferDeclined(reason="withdrawn"): "declined",
        OfferInDoubt(reason="slot taken"): "in_doubt",
    },
}


@pytest.mark.parametrize("json", [True, False], ids=["json", "msgpack"])
@pytest.mark.parametrize("kind", ANSWERS)
def test_every_answer_says_which_it_is_and_comes_back_the_same(kind: object, json: bool) -> None:
    for answer, name in ANSWERS[kind].items():
        raw = codec.encode(answer, json=json)
        fields = (msgspec.json if json else msgspec.msgpack).decode(raw)
        assert fields["type"] == name
        assert codec.answer(kind, raw, {codec.CONTENT_TYPE: codec.JSON_TYPE} if json else {}) == (
            answer
        )


def test_an_answer_of_no_known_kind_is_a_peer_s_error() -> None:
    with pytest.raises(PeerError):
        codec.answer(OfferAnswer, codec.encode(OfferInDoubt(reason=""), json=True), {})
    with pytest.raises(PeerError):
        codec.answer(HoldAnswer, msgspec.msgpack.encode({"type": "perhaps"}), {})
