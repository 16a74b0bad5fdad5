"""Chats about texts in the public domain: editing and summaries, whose answers repeat their prompt, and questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

TEXTS = (
    "Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in "
    "Liberty, and dedicated to the proposition that all men are created equal. Now we are engaged in a great "
    "civil war, testing whether that nation, or any nation so conceived and so dedicated, can long endure. We "
    "are met on a great battle-field of that war. We have come to dedicate a portion of that field, as a final "
    "resting place for those who here gave their lives that that nation might live.",
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: "
    "once or twice she had peeped into the book her sister was reading, but it had no pictures or conversations "
    "in it, 'and what is the use of a book,' thought Alice 'without pictures or conversations?' So she was "
    "considering in her own mind whether the pleasure of making a daisy-chain would be worth the trouble of "
    "getting up and picking the daisies, when suddenly a White Rabbit with pink eyes ran close by her.",
    "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse, and "
    "nothing particular to interest me on shore, I thought I would sail about a little and see the watery part "
    "of the world. It is a way I have of driving off the spleen and regulating the circulation. Whenever I find "
    "myself growing grim about the mouth; whenever it is a damp, drizzly November in my soul, then, I account "
    "it high time to get to sea as soon as I can.",
    "When in the Course of human events, it becomes necessary for one people to dissolve the political bands "
    "which have connected them with another, and to assume among the powers of the earth, the separate and "
    "equal station to which the Laws of Nature and of Nature's God entitle them, a decent respect to the "
    "opinions of mankind requires that they should declare the causes which impel them to the separation. We "
    "hold these truths to be self-evident, that all men are created equal.",
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want "
    "of a wife. However little known the feelings or views of such a man may be on his first entering a "
    "neighbourhood, this truth is so well fixed in the minds of the surrounding families, that he is considered "
    "as the rightful property of some one or other of their daughters. 'My dear Mr. Bennet,' said his lady to "
    "him one day, 'have you heard that Netherfield Park is let at last?'",
    "To Sherlock Holmes she is always the woman. I have seldom heard him mention her under any other name. In "
    "his eyes she eclipses and predominates the whole of her sex. It was not that he felt any emotion akin to "
    "love for Irene Adler. All emotions, and that one particularly, were abhorrent to his cold, precise but "
    "admirably balanced mind. He was, I take it, the most perfect reasoning and observing machine that the "
    "world has seen, but as a lover he would have placed himself in a false position.",
    "When on board H.M.S. Beagle, as naturalist, I was much struck with certain facts in the distribution of "
    "the inhabitants of South America, and in the geological relations of the present to the past inhabitants "
    "of that continent. These facts seemed to me to throw some light on the origin of species, that mystery of "
    "mysteries, as it has been called by one of our greatest philosophers. On my return home, it occurred to me "
    "that something might perhaps be made out on this question.",
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of "
    "foolishness, it was the epoch of belief, it was the epoch of incredulity, it was the season of Light, it "
    "was the season of Darkness, it was the spring of hope, it was the winter of despair, we had everything "
    "before us, we had nothing before us, we were all going direct to Heaven, we were all going direct the "
    "other way.",
)
"""Lincoln, Carroll, Melville, Jefferson, Austen, Doyle, Darwin and Dickens; all published before 1900."""

QUESTIONS = (
    "How do plants make food from light?",
    "Write a short story about a fox and a river.",
    "What should I pack for a week in the mountains?",
    "Explain to a child why the sky is blue.",
    "Give me five ideas for a healthy breakfast.",
    "What is the difference between a virus and a bacterium?",
    "How can I learn to play the guitar?",
    "Why do people keep diaries?",
)

CHATS: Mapping[str, Sequence[str]] = {
    "editing": [
        f"Correct the spelling of this text, and print all of it:\n\n{text}" for text in TEXTS
    ],
    "summaries": [f"Summarize this text in a few sentences:\n\n{text}" for text in TEXTS],
    "chat": QUESTIONS,
}
"""Messages of users by kind, eight of each."""
