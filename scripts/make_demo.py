"""Write the demo corpus: English-German sentence pairs from a synchronous grammar.

One derivation yields both languages: a clause is first chosen as a structure (subject, verb, objects, tense, ...) and
then spelled out by two linearisers. The words are in demo_lexicon.py. Some combinations of known words are held out
of train, dev and test; every sentence of test_compositional contains at least one of them (see data/README.md). Where
both of two renderings are right (synonyms, the place of a time, dass or none) chance decides, so that the German is
nearly, but not quite, a function of the English.

The grammar also knows which words say the same: those of dev, test and test_compositional go to files NAME.align, in
the Pharaoh format.

    python scripts/make_demo.py [OUT_DIR]
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeVar

from demo_lexicon import (
    ACC,
    ADJECTIVES,
    BE,
    BE_FORMS,
    CAUSES,
    CITIES,
    CONJUNCTIONS,
    COST,
    DAT,
    DECLENSION,
    DER,
    FLAWS,
    GEN,
    MERITS,
    MODALS,
    MONTHS,
    MOODS,
    NAMES,
    NO_COMPOUND,
    NO_DATIVE_PLURAL,
    NO_PRONOUN,
    NO_SUBORDINATE,
    NOM,
    NOUNS,
    OPINIONS,
    PAY,
    PLACEMENTS,
    PREPOSITIONS,
    PRONOUNS,
    PURPOSES,
    REFLEXIVE,
    RELATIVE,
    SCHEDULED,
    SPEECH_VERBS,
    TIMES,
    VERBS,
    WEATHER,
    WEEKDAYS,
    WILL,
    Adjective,
    Modal,
    Noun,
    Pair,
    Verb,
    article,
    clock,
    contract,
    determiner,
    english_s,
    listed,
    number,
    price,
)

SEED = 20170612
SIZES = {"train": 20_000, "dev": 500, "test": 500}
HELD_OUT_SHARE = 9  # one pair in so many is held out, for the classes that are pairs
# The held-out classes, in the order of their blocks in test_compositional, and the sentences of each.
CLASSES = {
    "adjective-noun": 50,
    "verb-object": 50,
    "subject-verb": 50,
    "modal-verb": 40,
    "preposition-noun": 50,
    "date": 40,
    "dative plural": 50,
    "pronoun": 40,
    "separable verb": 50,
    "relative clause": 40,
    "compound": 40,
}
# Held out by name, because these classes have few members.
NAMED = {
    "dative plural": NO_DATIVE_PLURAL,
    "pronoun": NO_PRONOUN,
    "separable verb": NO_SUBORDINATE,
    "compound": NO_COMPOUND,
}
# Held out because of a word form: the form itself (Kindern, anruft, Stadtpark) is new, although its parts are known.
NEW_FORMS = {
    "dative plural": {noun.german(True, DAT) for noun in NOUNS if noun.en in NO_DATIVE_PLURAL},
    "separable verb": {
        verb.prefix + verb.present(agreement) for verb in VERBS for agreement in BE_FORMS if verb.key in NO_SUBORDINATE
    },
    "compound": {
        noun.german(plural, case)
        for noun in NOUNS
        for plural in (False, True)
        for case in (NOM, ACC, DAT, GEN)
        if noun.en in NO_COMPOUND
    },
}

T = TypeVar("T")
N = TypeVar("N", "Noun", str)


class Phrase(NamedTuple):
    """A constituent in both languages."""

    en: str
    de: str
    agreement: str = "3s"
    pronoun: str = ""  # the English subject pronoun that stands for it
    is_pronoun: bool = False
    noun: Noun | None = None
    negative: bool = False  # contains kein
    definite: bool = False
    tail: Pair = ("", "")  # a relative clause, which German moves to the end of its clause


NOTHING = Phrase("", "")


# Which words say the same


class Marks:
    """Characters of Unicode's private area that stand behind words while the corpus is drawn.

    Words of the two languages that share one say the same. While marks are off they are empty, and texts are plain.
    """

    FIRST, COUNT = 0xE000, 6400
    is_on = False
    drawn = 0

    @classmethod
    def new(cls) -> str:
        if not cls.is_on:
            return ""
        cls.drawn += 1
        return chr(cls.FIRST + cls.drawn % cls.COUNT)


def is_mark(character: str) -> bool:
    return Marks.FIRST <= ord(character) < Marks.FIRST + Marks.COUNT


def unmarked(text: str) -> str:
    """The text without marks."""
    return "".join(character for character in text if not is_mark(character)) if Marks.is_on else text


def marked(text: str, mark: str) -> str:
    """The text with a mark behind each of its words."""
    return " ".join(word + mark for word in text.split(" ")) if text else ""


def tied(en: str, de: str) -> Pair:
    """Two texts that say the same as wholes."""
    mark = Marks.new()
    return marked(en, mark), marked(de, mark)


def paired(en: str, de: str) -> Pair:
    """Two texts that say the same word by word, if they have as many words; else as wholes."""
    words = en.split(" "), de.split(" ")
    if len(words[0]) != len(words[1]):
        return tied(en, de)
    return joined(*map(tied, *words))


def joined(*pairs: Pair) -> Pair:
    """Pairs one after the other, in the same order in both languages."""
    return join(*(en for en, _ in pairs)), join(*(de for _, de in pairs))


def contracted(preposition: str, phrase: str) -> str:
    """`contract` for marked words: "in dem Haus" becomes "im Haus", with the marks of both words behind "im"."""
    first, _, rest = phrase.partition(" ")
    head = contract(unmarked(preposition), unmarked(first))
    if " " in head:
        return join(preposition, first, rest)
    return join(head + "".join(filter(is_mark, preposition + first)), rest)


def links(en: str, de: str) -> str:
    """The alignment of two marked texts in the Pharaoh format: `0-0 1-2`, places of words, counted from 0.

    Where several words say the same as several others, none knows its own: those links are possible ones, `3p4`.
    """
    places = [
        {mark: [n for n, word in enumerate(text.split()) if mark in word] for mark in filter(is_mark, text)}
        for text in (en, de)
    ]
    kinds: dict[tuple[int, int], str] = {}
    for mark in places[0].keys() & places[1].keys():
        sources, targets = (side[mark] for side in places)
        kind = "-" if min(len(sources), len(targets)) == 1 else "p"
        for link in ((source, target) for source in sources for target in targets):
            kinds[link] = min(kind, kinds.get(link, kind))  # "-" comes first
    return " ".join(f"{source}{kind}{target}" for (source, target), kind in sorted(kinds.items()))


@dataclass(slots=True)
class Clause:
    subject: Phrase
    verb: Verb
    past: bool = False
    modal: Modal | None = None
    negated: bool = False
    objects: list[Phrase] = field(default_factory=list)
    adjunct: Phrase = NOTHING
    time: Phrase = NOTHING
    progressive: bool = False
    future_present: bool = False  # the German leaves "will" to the time
    late_time: bool = False  # the German time follows the objects
    verb_mark: str = field(default_factory=Marks.new)
    modal_mark: str = field(default_factory=Marks.new)
    not_mark: str = field(default_factory=Marks.new)
    rest_mark: str = field(default_factory=Marks.new)  # of a preposition that the verb governs

    @property
    def nicht(self) -> str:
        says_kein = any(phrase.negative for phrase in self.objects)
        return marked("nicht", self.not_mark) if self.negated and not says_kein else ""

    @property
    def rest(self) -> str:
        """What follows the English verb; its last word is a preposition where the German has one, too."""
        is_governed = "+" in self.verb.frame and self.verb.frame != "dat+acc"
        before, _, last = self.verb.rest.rpartition(" ")
        return join(marked(before, self.verb_mark), marked(last, self.rest_mark if is_governed else self.verb_mark))

    def german_object(self, phrase: Phrase) -> str:
        """An object; in a negated clause, kein also says not."""
        return re.sub(r"\bkein\w*", rf"\g<0>{self.not_mark}", phrase.de) if self.negated else phrase.de

    @property
    def tail(self) -> Pair:
        return self.objects[-1].tail if self.objects else ("", "")


@cache
def nouns_with(*tags: str) -> tuple[Noun, ...]:
    return tuple(noun for noun in NOUNS if not noun.tags.isdisjoint(tags))


@cache
def simple_nouns(tag: str) -> tuple[Noun, ...]:
    """No garden chair is to be found in the bathroom."""
    return tuple(noun for noun in nouns_with(tag) if not noun.compound)


@cache
def adjectives_for(noun: Noun, tag: str = "") -> tuple[Adjective, ...]:
    """The adjectives that may modify the noun; those with a tag such as "mood" or "colour" where one is given."""
    fitting = (adjective for adjective in ADJECTIVES if not adjective.tags.isdisjoint(noun.tags))
    return tuple(adjective for adjective in fitting if not tag or tag in adjective.tags)


@cache
def held_out(kind: str, *key: str) -> bool:
    """Whether a combination belongs to the compositional test set alone. Named sets where a class is small, a fixed
    hash of the names where it consists of pairs."""
    if kind in NAMED:
        return key[0] in NAMED[kind]
    if kind == "relative clause":
        return True
    return zlib.crc32(":".join((kind, *key)).encode()) % HELD_OUT_SHARE == 0


# Linearisation


def join(*parts: str) -> str:
    return " ".join(filter(None, parts))


def english(clause: Clause, order: str = "statement") -> str:
    """Spell out a clause. Orders: statement, question, infinitive, fronted (a statement after its time)."""
    verb, modal, agreement = clause.verb, clause.modal, clause.subject.agreement
    asks, no = order == "question", marked("not", clause.not_mark) if clause.negated else ""
    of_verb = clause.verb_mark
    of_modal = of_verb if clause.future_present else clause.modal_mark  # "will come" is kommt
    base = marked(verb.en, of_verb)
    if order == "infinitive":
        finite, rest = "", base
    elif modal and modal.auxiliary:
        finite, rest = marked(modal.en, of_modal), join(no, base)
        if modal.en == "can" and no and not asks:
            finite, rest = marked("cannot", of_modal + clause.not_mark), base
    elif verb is BE:
        finite, rest = marked(BE_FORMS[agreement][1 if clause.past else 0], of_verb), no
    elif clause.progressive:
        finite, rest = marked(BE_FORMS[agreement][0], of_verb), join(no, marked(verb.gerund, of_verb))
    else:
        head, tail = (modal.en.split()[0], join(marked("to", of_modal), base)) if modal else (verb.en, "")
        of_head = of_modal if modal else of_verb
        past = (modal is not None and modal.kind == "past") or clause.past
        if asks or no:
            finite = marked("did" if past else "does" if agreement == "3s" else "do", of_head)
            rest = join(no, marked(head, of_head), tail)
        elif past:
            finite, rest = marked(modal.en_past.split()[0] if modal else verb.en_past, of_head), tail
        else:
            finite, rest = marked(english_s(head) if agreement == "3s" else head, of_head), tail
    objects = join(*(phrase.en for phrase in clause.objects))
    if verb.particle:
        pronoun = bool(clause.objects) and clause.objects[-1].is_pronoun
        particle = marked(verb.particle, of_verb)
        objects = join(objects, particle) if pronoun else join(particle, objects)
    subject = "" if order == "infinitive" else clause.subject.en
    core = (finite, subject, rest) if asks else (subject, finite, rest)
    first, last = (clause.time.en, "") if order == "fronted" else ("", clause.time.en)
    return join(first, *core, clause.rest, objects, clause.adjunct.en, clause.tail[0], last)


def german_verb(clause: Clause) -> tuple[str, str, str]:
    """The finite verb, what closes the clause when it comes second, and both together when it comes last."""
    verb, agreement, mark = clause.verb, clause.subject.agreement, clause.verb_mark
    if clause.modal and not clause.future_present:
        infinitive = marked(verb.prefix + verb.infinitive, mark)
        finite = marked(clause.modal.de[agreement], clause.modal_mark)
        return finite, infinitive, join(infinitive, finite)
    if clause.past and verb.preterite:
        ending = "" if agreement != "pl" else "n" if verb.preterite.endswith("e") else "en"
        finite = marked(verb.preterite + ending, mark)
        return finite, "", finite
    if clause.past:
        sein = {"1s": "bin", "3s": "ist", "pl": "sind"}
        finite = marked((sein if verb.sein else {"1s": "habe", "3s": "hat", "pl": "haben"})[agreement], mark)
        participle = marked(verb.participle, mark)
        return finite, participle, join(participle, finite)
    finite = BE_FORMS[agreement][2] if verb is BE else verb.present(agreement)
    return marked(finite, mark), marked(verb.prefix, mark), marked(verb.prefix + finite, mark)


def german(clause: Clause, order: str = "second") -> str:
    """Spell out a clause. Orders: second (the subject first), fronted (the time first), first (the finite verb first),
    last (subordinate), infinitive (with zu), headless (shares the subject), shared (and the finite verb, too)."""
    finite, closing, both = german_verb(clause)
    time = "" if order == "fronted" else clause.time.de
    early = join(*(clause.german_object(phrase) for phrase in clause.objects if phrase.noun is None))
    late = join(*(clause.german_object(phrase) for phrase in clause.objects if phrase.noun))
    middle = join(early, *((late, time) if clause.late_time else (time, late)), clause.nicht, clause.adjunct.de)
    subject, tail, sich = clause.subject.de, clause.tail[1], german_sich(clause)
    if order == "second":
        return join(subject, finite, sich, middle, closing, tail)
    if order == "infinitive":
        return join(sich, middle, marked(clause.verb.zu_infinitive, clause.verb_mark), tail)
    if order in ("headless", "shared"):
        return join(finite if order == "headless" else "", sich, middle, closing, tail)
    # Elsewhere sich follows a pronoun and precedes a noun: dass er sich freut, dass sich Anna freut.
    subject = join(subject, sich) if clause.subject.is_pronoun else join(sich, subject)
    if order == "last":
        return join(subject, middle, both, tail)
    return join(clause.time.de if order == "fronted" else "", finite, subject, middle, closing, tail)


def german_sich(clause: Clause) -> str:
    case = clause.verb.reflexive
    return marked(REFLEXIVE.get(clause.subject.pronoun, {}).get(case, "sich"), clause.verb_mark) if case else ""


def sentence(text: str, end: str) -> str:
    """Capital, end mark; a comma that closes a relative clause yields to the punctuation that follows it."""
    text = re.sub(r"(?: ?,)+", ",", text).rstrip(",")
    return text[0].upper() + text[1:] + end


class Rejected(Exception):
    """The derivation came upon something that its split must not contain."""


class Grammar:
    """Draws sentence pairs. `focus` names the only held-out class whose combinations are allowed just now."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed).random
        self.focus = ""
        self.found = False  # whether the derivation holds a held-out combination
        self.used: list[Noun | str] = []  # the nouns and names of the derivation, which do not come twice

    # Chance: random() alone is the same in every Python version.

    def chance(self, probability: float) -> bool:
        return self.random() < probability

    def below(self, count: int) -> int:
        return int(self.random() * count)

    def pick(self, items: Sequence[T]) -> T:
        return items[int(self.random() * len(items))]

    def weighted(self, items: dict[T, float]) -> T:
        total = 0.0
        for weight in items.values():  # not sum(), whose rounding depends on the version
            total += weight
        point = self.random() * total
        for item, weight in items.items():
            point -= weight
            if point < 0:
                return item
        return item

    def note(self, kind: str, *key: str) -> None:
        if held_out(kind, *key):
            if kind != self.focus:
                raise Rejected
            self.found = True

    def pair(self) -> Pair:
        """One sentence pair, marked: of the focus class, or free of everything held out."""
        templates = FOCUSED.get(self.focus, TEMPLATES)
        while True:
            self.found, self.used = False, []
            template = self.weighted(templates)
            try:
                en, de, end = template(self)
            except Rejected:
                continue
            if self.found == bool(self.focus):
                return sentence(en, end), sentence(de, end)

    def new(self, items: Sequence[N]) -> N:
        """Pick a noun or a name that the sentence does not have yet."""
        for _ in range(4):
            item = self.pick(items)
            if item not in self.used:
                self.used.append(item)
                return item
        raise Rejected

    # Noun phrases

    def article_words(self, noun: Noun, plural: bool, role: str, owner: str) -> tuple[str, str, str]:
        """English word ("a": to be adjusted), German stem, and kind of declension."""
        if role == "whose":
            return "whose", owner, "none"
        en, de, _ = PRONOUNS[owner]
        possessive, numeral = (en[2], de[3], "ein"), (*number(self.count(role == "crowd")), "none")
        the, indefinite = ("the", "", "der"), ("", "", "none") if noun.mass or plural else ("a", "ein", "ein")
        many, some = ("many", "viel", "viel"), ("some", "einig", "viel")
        this, owned = ("these" if plural else "this", "dies", "dies"), 0 if "unowned" in noun.tags else 1
        if role == "negated":
            none = ("any", "kein", "ein") if noun.mass or plural else ("a", "kein", "ein")
            return self.weighted({the: 5, possessive: 2 * owned, none: 5})
        if role in ("new", "crowd"):
            if "kin" in noun.tags:
                raise Rejected
            return self.weighted({numeral: 4, many: 3 * (role == "crowd"), some: 1}) if plural else indefinite
        if noun.mass:
            return self.weighted({the: 1, indefinite: 2 * (role != "topic")})
        if "kin" in noun.tags:
            return self.weighted({the: 0.3, possessive: 4})
        if role in ("place", "topic"):
            return self.weighted({the: 5, possessive: 2 * owned, this: 0.4})
        subject = role == "subject"
        if plural:
            bare = 0 if subject or "person" in noun.tags else 1.5
            return self.weighted({the: 5, possessive: 1.5 * owned, this: 1, numeral: 1.5, some: 0.5, indefinite: bare})
        every = ("every", "jed", "dies")
        return self.weighted({the: 6, indefinite: 2.5, possessive: 1.5 * owned, this: 0.8, every: 0.15 * subject})

    def count(self, large: bool) -> int:
        if large and self.chance(0.25):
            return 13 + self.below(87)
        return 2 + self.below(4 if self.chance(0.8) else 11)

    def modifiers(self, noun: Noun, probability: float, role: str) -> list[Adjective]:
        """Adjectives before the noun. A broken lamp or a sad man is mentioned only where it matters."""
        if not self.chance(probability):
            return []
        unfit = {"intact"} if role == "defect" else {"defect"}
        unfit |= {"mood"} if role != "mood" else set()
        fitting = [adjective for adjective in adjectives_for(noun) if unfit.isdisjoint(adjective.tags)]
        if not fitting:
            return []
        adjectives = [self.pick(fitting)]
        if "size" in adjectives[0].tags and "coloured" in noun.tags and self.chance(0.3):
            adjectives.append(self.pick(adjectives_for(noun, "colour")))
        for adjective in adjectives:
            self.note("adjective-noun", adjective.en, noun.en)
        return adjectives

    def noun_phrase(self, nouns: Sequence[Noun], case: str, role: str = "object", owner: str = "I") -> Phrase:
        """A noun with its article and adjectives. Roles: subject, object, topic (definite), place (rarely plural),
        negated (the object of a negated verb), new (indefinite), crowd (so, and in any number), plain (singular,
        definite), single, defect or mood (an object that may be broken, sad), related (the object that a relative
        clause follows), whose (of a relative clause)."""
        noun = self.new(nouns)
        if noun.compound:
            self.note("compound", noun.en)
        focused = case == DAT and self.focus == "dative plural"
        often = 0.03 if role == "place" else 0.9 if "plural" in noun.tags else 0.25
        alone = noun.mass or role in ("plain", "single") or ("sole" in noun.tags and role != "crowd")
        plural = not alone and (focused or self.chance(often))
        if plural and case == DAT:
            self.note("dative plural", noun.en)
        gender = "p" if plural else noun.gender
        en, stem, kind = ("the", "", "der") if role == "plain" else self.article_words(noun, plural, role, owner)
        adjectives = self.modifiers(noun, 0.15 if role in ("plain", "whose") else 0.5, role)
        possessor = NOTHING
        owned = kind == "der" and role != "plain" and noun.tags.isdisjoint(("person", "unowned", "event"))
        if owned and self.chance(0.07):
            possessor = self.possessor()
            en, kind = possessor.en + "'s", kind if possessor.noun else "none"
        endings = DECLENSION[kind][gender]
        words, wörter = joined(
            *(tied(adjective.en, adjective.stem + endings[case]) for adjective in adjectives),
            tied(noun.english(plural), noun.german(plural, case)),
        )
        mark = Marks.new()
        first = en if possessor.en else marked(article(words) if en == "a" else en, mark)
        return Phrase(
            join(first, words),
            join(
                possessor.de if kind == "none" and possessor.de else marked(determiner(stem, kind, gender, case), mark),
                wörter,
                possessor.de if kind == "der" else "",
            ),
            agreement="pl" if plural else "3s",
            pronoun="they" if plural else {"m": "he", "f": "she"}.get(noun.gender, ""),
            noun=noun,
            negative=stem == "kein",
            definite=en not in ("a", "", "some"),
        )

    def possessor(self) -> Phrase:
        """The teacher's, Anna's: a genitive after or a name before the noun."""
        if self.chance(0.4):
            name = self.new(list(NAMES))
            return Phrase(*tied(name, name + "s"))
        return self.noun_phrase(nouns_with("person"), GEN, "plain")

    def pronoun(self, choices: str) -> Phrase:
        (en, *_), (de, *_), agreement = PRONOUNS[self.pick(choices.split())]
        return Phrase(*tied(en, de), agreement, pronoun=en, is_pronoun=True)

    def name(self) -> Phrase:
        name = self.new(list(NAMES))
        return Phrase(*tied(name, name), pronoun=NAMES[name])

    def subject(
        self, tags: Sequence[str] = ("person",), *, full: bool = False, pronouns: str = "I he she we they"
    ) -> Phrase:
        """Full: no pronoun."""
        if not ADULT.isdisjoint(tags):
            kind = self.weighted({"pronoun": 0.0001 if full else 3.0, "name": 2.0, "noun": 6.0})
            if kind != "noun":
                return self.name() if kind == "name" else self.pronoun(pronouns)
        return self.noun_phrase(nouns_with(*tags), NOM, "subject", owner=self.pick(["I", "we", "he", "she"]))

    def again(self, subject: Phrase) -> Phrase:
        """A pronoun for a subject just mentioned; none for Kind and Mädchen, where usage varies."""
        if not subject.pronoun:
            raise Rejected
        return self.pronoun(subject.pronoun)

    def it(self, phrase: Phrase) -> Phrase:
        """A pronoun for a thing: it (er, sie, es), they (sie)."""
        if phrase.noun is None or phrase.agreement == "pl":
            return self.pronoun("they")
        self.note("pronoun", phrase.noun.en)
        return Phrase(*tied("it", {"m": "er", "f": "sie", "n": "es"}[phrase.noun.gender]), is_pronoun=True)

    def object(self, verb: Verb, case: str, subject: Phrase, role: str) -> Phrase:
        if "person" in verb.objects and self.chance(0.35) and role != "related":
            choice = self.pick(["name", "I", "he", "she", "we", "they"])
            if choice == "name":
                return self.name()
            if choice != subject.pronoun and {choice, subject.pronoun} != {"I", "we"}:
                en, de, _ = PRONOUNS[choice]
                return Phrase(*tied(en[1], de[2 if case == DAT else 1]), is_pronoun=True)
        owner = subject.pronoun or "I"
        phrase = self.noun_phrase(nouns_with(*verb.objects), case, role, owner)
        if phrase.noun:
            self.note("verb-object", verb.key, phrase.noun.en)
            if "womens" in phrase.noun.tags and "single" in verb.extras and subject.pronoun == "he":
                raise Rejected
        return phrase

    def prepositional(self, relation: str, owner: str, tags: Sequence[str], *, whither: bool = False) -> Phrase:
        preposition, cases = PREPOSITIONS[relation]
        if relation in ("with", "for") and self.chance(0.25):
            phrase = self.name()
        else:
            role = "object" if tags[0] == "person" else "plain" if tags[0] == "event" else "place"
            phrase = self.noun_phrase(nouns_with(*tags), cases[whither], role, owner)
        if phrase.noun:
            self.note("preposition-noun", relation, phrase.noun.en)
        marked_en, marked_de = tied(relation, preposition)
        return Phrase(f"{marked_en} {phrase.en}", contracted(marked_de, phrase.de))

    def relative(self, noun: Noun, agreement: str, main: Verb, tense: str) -> Pair:
        """A relative clause (nominative, accusative, dative or genitive) on a noun, with another verb than the main."""
        kinds = {"past": ["past"], "present": ["present", "past"], "future": ["present", "future"]}
        kind = self.pick(kinds[tense])
        gender = "p" if agreement == "pl" else noun.gender
        human = "person" in noun.tags
        acts = [verb for verb in VERBS if verb.key != main.key and not noun.tags.isdisjoint(verb.subjects)]
        bears = [verb for verb in BEARERS if verb.key != main.key and not noun.tags.isdisjoint(verb.objects)]
        if human and self.chance(0.15):
            verb = self.pick(BELONGING)
            owned_nouns = [noun for noun in nouns_with(*verb.subjects) if not noun.tags.isdisjoint(OWNED)]
            owned = self.noun_phrase(owned_nouns, NOM, "whose", RELATIVE[gender][GEN])
            clause = self.clause(verb, owned._replace(is_pronoun=True), kind, plain=True)
        elif acts and (not bears or self.chance(0.5)):
            words = tied("who" if human else "which", RELATIVE[gender][NOM])
            pronoun = Phrase(*words, agreement, noun=noun, is_pronoun=True)
            clause = self.clause(self.pick(acts), pronoun, kind, plain=True)
        elif not bears:
            raise Rejected
        else:
            verb = self.pick(bears)
            self.note("verb-object", verb.key, noun.en)
            clause = self.clause(verb, self.subject(verb.subjects), kind, plain=True, gap=True)
            pronoun_de = RELATIVE[gender][verb.frame.rpartition("+")[2]]
            en, de = tied("whom" if human else "which", pronoun_de)
            return join(en, english(clause)), f", {de} {self.last(clause)} ,"
        return english(clause), f", {self.last(clause)} ,"

    # Clauses

    def time(self, kind: str, verb: Verb) -> Phrase:
        yearly = "year" in verb.extras
        if kind != "present":
            date = 40 if self.focus == "date" else 1.5
            form = self.weighted({"adverb": 6, "date": date, "day": 1, "count": 1, "month": 1.5 * yearly})
            if form == "date":
                month, monat, days = self.pick(MONTHS)
                day = 1 + self.below(days)
                while self.focus == "date" and not held_out("date", str(day), month):
                    day = 1 + self.below(days)
                self.note("date", str(day), month)
                return Phrase(*paired(f"on {day} {month}", f"am {day}. {monat}"))
            if form == "day":
                day_en, day_de = self.pick(WEEKDAYS)
                return Phrase(*paired(f"on {day_en}", f"am {day_de}"))
            if form == "month":
                if kind == "past" and self.chance(0.5):
                    year = 1980 + self.below(45)
                    return Phrase(
                        *joined(tied("in", "im Jahr" if self.chance(0.8) else ""), tied(str(year), str(year)))
                    )
                month, monat, _ = self.pick(MONTHS)
                return Phrase(*paired(f"in {month}", f"im {monat}"))
            if form == "count":
                count_en, count_de = number(2 + self.below(5))
                unit, einheit = self.pick([("days", "Tagen"), ("weeks", "Wochen")])
                span_en, span_de = paired(f"{count_en} {unit}", f"{count_de} {einheit}")
                ago, vor = tied("ago" if kind == "past" else "in", "vor" if kind == "past" else "in")
                return Phrase(join(*((span_en, ago) if kind == "past" else (ago, span_en))), join(vor, span_de))
        kinds = {
            kind,
            "yearly-" + kind if yearly else "",
            *({"ing", "daily"} & {*verb.extras} if kind == "present" else ()),
        }
        en, de = self.pick([(en, de) for en, de, fitting in TIMES if not kinds.isdisjoint(fitting)])
        if en in ("tomorrow", "yesterday", "today", "every day") and not yearly and self.chance(0.4):
            return Phrase(*joined(paired(en, de), self.hour()))
        return Phrase(*paired(en, de))

    def hour(self) -> Pair:
        if self.chance(0.25):
            en, de = clock(6 + self.below(17), 5 * self.pick([1, 2, 4, 5, 7, 8, 10, 11]))
        else:
            en, de = clock(1 + self.below(12), 15 * self.below(4))
        return joined(tied("at", "um"), paired(en.removeprefix("at "), de.removeprefix("um ")))

    def adjunct(self, verb: Verb, subject: Phrase, *, optional: bool) -> Phrase:
        person = subject.noun is None or "person" in subject.noun.tags
        animal = subject.noun is not None and "animal" in subject.noun.tags
        owner = subject.pronoun or "I"
        required = [extra[:-1] for extra in verb.extras if extra.endswith("!")]
        possible = [extra for extra in verb.extras if re.match("in=|to:|with|for|during|after|town", extra)]
        if not person:
            possible = [extra for extra in possible if extra not in ("with", "for")]
        possible = [extra for extra in possible if extra not in required]
        if not required and not (optional and possible and self.chance(0.5)):
            return NOTHING
        kind = required[0] if required else self.pick(possible)
        there = self.place(kind, owner, animal=animal)
        if required and person and "with" in possible and self.chance(0.2):
            company = self.place("with", owner, animal=False)
            there = Phrase(f"{there.en} {company.en}", f"{company.de} {there.de}")
        return there

    def place(self, kind: str, owner: str, *, animal: bool) -> Phrase:
        """What an entry among the extras of a verb asks for."""
        if kind in ("fly", "ride", "town"):
            city = self.pick(list(CITIES))
            if kind == "town":
                return Phrase(*paired(f"in {city}", f"in {CITIES[city]}"))
            there = Phrase(*paired(f"to {city}", f"nach {CITIES[city]}"))
            if kind == "ride" and self.chance(0.6):
                vehicle = self.pick(nouns_with("road"))
                by, mit = joined(tied("by", f"mit {DER[vehicle.gender][DAT]}"), tied(vehicle.en, vehicle.de))
                return Phrase(f"{there.en} {by}", f"{mit} {there.de}")
            return there
        mark, _, name = kind.partition(":")
        if name:
            relation, tag = self.pick(PLACEMENTS[name])
            if animal:
                relation, tag = "into", "outdoor"
            return self.prepositional(relation, owner, (tag,), whither=mark == "to")
        relation, _, tag = kind.partition("=")
        tag = tag or {"during": "event", "after": "event", "from": "room"}.get(relation, "person")
        return self.prepositional(relation, owner, ("outdoor" if animal and relation == "in" else tag,))

    def tense(self, kind: str, verb: Verb) -> tuple[bool, Modal | None]:
        """Past or not, and a modal verb; "will" counts as one."""
        if kind == "present":
            return False, None
        modal = WILL if kind == "future" else None
        if "modal" in verb.extras and self.chance(0.7 if kind == "future" else 0.2):
            modal = self.pick([modal for modal in MODALS if modal.kind == kind])
        if modal:
            self.note("modal-verb", modal.en_past, verb.key)
        return kind == "past" and modal is None, modal

    def clause(
        self,
        verb: Verb,
        subject: Phrase,
        kind: str = "",
        *,
        plain: bool = False,
        gap: bool = False,
        related: bool = False,
        timed: bool = True,
        affirmative: bool = False,
        simple: bool = False,
    ) -> Clause:
        """A clause around a verb. Kinds: present, past, future. Plain: short, not negated; gap: its last object has
        been moved out; related: its last object carries a relative clause; simple: not progressive."""
        kind = kind or self.weighted({"present": 4, "past": 4, "future": 3.5})
        if (kind == "future" and "state" in verb.extras) or (kind != "past" and "past" in verb.extras):
            raise Rejected
        if "single" in verb.extras and subject.agreement == "pl" and subject.pronoun != "you":
            raise Rejected  # several do not put on one hat
        past, modal = self.tense(kind, verb)
        if subject.noun:
            self.note("subject-verb", subject.noun.en, verb.key)
        if past and verb.en == verb.en_past and subject.agreement != "3s":
            raise Rejected  # "they read" would not tell its tense
        negated = not (plain or related or affirmative) and self.chance(0.14) and (modal is None or modal.negatable)
        clause = Clause(subject, verb, past, modal, negated)
        usual = next((role for role in ("defect", "single", "mood") if role in verb.extras), "object")
        role = "related" if related else "negated" if negated else usual
        preposition, _, case = verb.frame.rpartition("+")
        if verb.frame == "dat+acc":
            receiver = replace(verb, objects=("person",))
            clause.objects.append(self.object(receiver, DAT, subject, "object"))
            clause.objects += [] if gap else [self.object(verb, ACC, subject, role)]
        elif verb.frame != "-" and not gap:
            target = self.object(verb, case, subject, "topic" if preposition and negated else role)
            if preposition:
                target = target._replace(de=contracted(marked(preposition, clause.rest_mark), target.de))
                clause.adjunct = Phrase(target.en, target.de)
            else:
                clause.objects.append(target)
        self.complete(clause, kind, plain=plain, related=related, timed=timed)
        now = unmarked(clause.time.en) in ("now", "at the moment")
        going_on = kind == "present" and not simple and "ing" in verb.extras and "every" not in clause.time.en
        clause.progressive = now or (going_on and self.chance(0.5))
        return clause

    def complete(self, clause: Clause, kind: str, *, plain: bool, related: bool, timed: bool) -> None:
        """Add the adjunct, the time and a relative clause."""
        verb, last = clause.verb, clause.objects[-1] if clause.objects else NOTHING
        if related:
            if last.noun is None:
                raise Rejected
            clause.objects[-1] = last._replace(tail=self.relative(last.noun, last.agreement, verb, kind))
        if clause.adjunct is NOTHING:
            clause.adjunct = self.adjunct(verb, clause.subject, optional=not plain and not related)
            if related and clause.adjunct is not NOTHING:
                raise Rejected
        movable = not related and not (clause.negated and clause.objects)  # else usage varies
        if not (timed and movable and "state" not in verb.extras and self.chance(0.2 if plain else 0.5)):
            return
        clause.time = self.time(kind, verb)
        if clause.time.en.startswith("every") and (clause.negated or re.match("during|after", clause.adjunct.en)):
            raise Rejected  # "not every day" means something else
        if unmarked(clause.time.en) == "soon" and (clause.negated or clause.modal is not WILL):
            raise Rejected
        clause.late_time = last.noun is not None and last.definite and self.chance(0.15)
        clause.future_present = clause.modal is WILL and clause.time is not NOTHING and self.chance(0.2)

    def action(
        self, subject: Phrase | None = None, kind: str = "", among: Sequence[str] = (), **options: bool
    ) -> Clause:
        """A clause around any verb, or one of some, that fits the subject (a person, if there is one)."""
        verbs = RELATABLE if options.get("related") else VERBS
        if subject is not None:
            tags = subject.noun.tags if subject.noun else ADULT
            verbs = [verb for verb in verbs if not tags.isdisjoint(verb.subjects)]
        if among:
            verbs = [verb for verb in verbs if verb.key in among]
        if not verbs:
            raise Rejected
        verb = self.pick(verbs)
        return self.clause(verb, subject or self.subject(verb.subjects), kind, **options)

    def inner(self, subject: Phrase | None, kind: str, among: Sequence[str] = (), **options: bool) -> Clause:
        """A clause to be made subordinate; only one test class has a relative clause within it."""
        related = self.focus == "relative clause"
        if related:
            self.note("relative clause")
        clause = self.action(subject, kind, () if self.focus in FOCUSED else among, related=related, **options)
        if unmarked(clause.subject.en).startswith("every "):
            raise Rejected
        return clause

    def last(self, clause: Clause) -> str:
        """The verb-final German of a clause."""
        if clause.verb.prefix:
            self.note("separable verb", clause.verb.key)
        return german(clause, "last")

    def be(self, subject: Phrase, choices: Sequence[str] = (), *, past: bool = False, known: str = "") -> Clause:
        """The subject, of which something may be known already, is tired, is not very big."""
        noun = subject.noun or NOUNS[0]
        fitting = [a for a in adjectives_for(noun) if (a.en in choices if choices else "colour" not in a.tags)]
        if not fitting:
            raise Rejected
        adjective = self.pick(fitting)
        if not adjective.clash.isdisjoint(unmarked(known or subject.en).split()):
            raise Rejected
        if subject.noun and subject.is_pronoun and held_out("adjective-noun", adjective.en, subject.noun.en):
            raise Rejected  # neither seen nor a fair example
        if subject.noun and not subject.is_pronoun:
            self.note("adjective-noun", adjective.en, subject.noun.en)
        very = not {"colour", "defect", "device"} & adjective.tags and adjective.en not in ABSOLUTE and self.chance(0.2)
        much = tied("very", "sehr") if very else ("", "")
        predicate = Phrase(*joined(much, tied(adjective.en, adjective.de)))
        return Clause(subject, BE, past, None, self.chance(0.15), adjunct=predicate)

    # Sentences: English, German, end mark

    def statement(self) -> Sentence:
        return *self.main(self.action()), "."

    def main(self, clause: Clause, *, front: float = 0.45) -> Pair:
        """A main clause; a time may come first, in German now and then where the English has it last or the reverse."""
        if clause.time is NOTHING:
            return english(clause), german(clause)
        fronted = self.chance(front)
        fronted_de = fronted if front == 1 else fronted != self.chance(0.07)
        en = english(clause, "fronted" if fronted else "statement")
        return en, german(clause, "fronted" if fronted_de else "second")

    def question(self) -> Sentence:
        clause = self.action(self.subject(pronouns="you you he she we they"))
        clause.negated = clause.negated and any(phrase.negative for phrase in clause.objects)
        return english(clause, "question"), german(clause, "first"), "?"

    def wh_question(self) -> Sentence:
        word = self.pick(["who", "whom", "when", "why", "where", "what", "how many"])
        if word == "who":
            clause = self.clause(self.pick(PERSONAL), Phrase(*tied("who", "wer"), is_pronoun=True))
            return english(clause), german(clause), "?"
        if word == "how many":
            things, place, _ = self.pick(SCENES)
            noun, there = self.new(simple_nouns(things)), self.prepositional("in", "I", (place,))
            asked = joined(paired("how many", "wie viele"), tied(noun.en_plural, noun.de_plural))
            return *joined(asked, paired("are there", "gibt es"), (there.en, there.de)), "?"
        verb = self.pick(ASKABLE[word])
        subject = self.subject(pronouns="you you he she we they")
        clause = self.clause(verb, subject, plain=True, gap=word in ("what", "whom"), timed=word != "when", simple=True)
        question_words = {"when": "wann", "why": "warum", "where": "wo", "what": "was"}
        german_word = question_words.get(word) or {ACC: "wen", DAT: "wem"}[verb.frame]
        return *joined(tied(word, german_word), (english(clause, "question"), german(clause, "first"))), "?"

    def request(self) -> Sentence:
        verb = self.pick([verb for verb in PERSONAL if "modal" in verb.extras and verb.key not in UNASKED])
        subject = Phrase("", "Sie", "pl", pronoun="you", is_pronoun=True)
        clause = self.clause(verb, subject, "present", plain=True, timed=False, simple=True)
        return *joined(tied("please", "bitte"), (english(clause), german(clause, "first"))), "."

    def description(self) -> Sentence:
        subject = self.noun_phrase(nouns_with(*DESCRIBED), NOM, "topic")
        past = self.chance(0.3)
        if subject.noun and "person" in subject.noun.tags and self.chance(0.4):
            if re.search("young|old", subject.en):
                raise Rejected
            en, de = number(3 + self.below(15) if "young" in subject.noun.tags else 20 + self.below(70))
            clause = Clause(subject, BE, adjunct=Phrase(*paired(f"{en} years old", f"{de} Jahre alt")))
        else:
            clause = self.be(subject, past=past)
            if self.chance(0.25) and subject.noun and not subject.noun.tags.isdisjoint(("furniture", "device", "hung")):
                there = self.prepositional("in", "I", ("room",))
                clause.subject = subject._replace(en=join(subject.en, there.en), de=join(subject.de, there.de))
        return *self.main(clause), "."

    def contrast(self) -> Sentence:
        """The lamp is beautiful, but it is expensive; but it is not practical."""
        subject = self.noun_phrase(nouns_with(*THINGS), NOM, "topic")
        known, other = self.pick([(MERITS, FLAWS), (FLAWS, MERITS)])
        first = self.be(subject, known)
        negated = self.chance(0.5)
        both = f"{subject.en} {first.adjunct.en}"
        second = self.be(self.it(subject)._replace(noun=subject.noun), known if negated else other, known=both)
        first.negated, second.negated = False, negated
        but, aber = tied("but", "aber")
        return f"{english(first)}, {but} {english(second)}", f"{german(first)}, {aber} {german(second)}", "."

    def cost(self) -> Sentence:
        noun = self.new(nouns_with("ware", "machine"))
        self.used.clear()
        amount = Phrase(*paired(*price(self.cents(noun))))
        if self.chance(0.35):
            payer = self.subject()
            role = "object" if "food" in noun.tags else "single"
            goods = self.noun_phrase([noun], ACC, role, payer.pronoun or "I")
            purchase = Phrase(*joined(tied("for", "für"), (goods.en, goods.de)))
            clause = Clause(payer, PAY, past=True, objects=[amount], adjunct=purchase)
            if self.chance(0.4):
                clause.time = self.time("past", PAY)
            return *self.main(clause, front=1), "."
        clause = Clause(self.noun_phrase([noun], NOM, "topic"), COST)
        if self.chance(0.15):
            asked = english(clause, "question"), german(clause, "first")
            return *joined(paired("how much", "wie viel"), asked), "?"
        if self.chance(0.25):
            amount = Phrase(*joined(tied("only", "nur"), (amount.en, amount.de)))
        clause.objects.append(amount)
        return *self.main(clause), "."

    def cents(self, noun: Noun) -> int:
        """A price of the right order of magnitude."""
        if "food" in noun.tags:
            return 50 + 5 * self.below(180 if "meal" in noun.tags else 80)
        if "vehicle" in noun.tags:
            return 100_000 * (1 + self.below(30)) + 5_000 * self.below(20)
        if not noun.tags.isdisjoint(("furniture", "costly")):
            return 100 * (60 + self.below(1500))
        return 5 * (80 + self.below(1000)) if self.chance(0.6) else 100 * (5 + self.below(60))

    def existence(self) -> Sentence:
        things, place, many = self.pick(SCENES)
        past = self.chance(0.25)
        thing = self.noun_phrase(simple_nouns(things), ACC, "crowd" if many else "new")
        there = self.prepositional("in", "I", (place,))
        verb, gibt = tied(BE_FORMS[thing.agreement][past], "gab" if past else "gibt")
        subject, es = tied("there", "es")
        de = f"{there.de} {gibt} {es} {thing.de}" if self.chance(0.8) else f"{es} {gibt} {there.de} {thing.de}"
        return f"{subject} {verb} {thing.en} {there.en}", de, "."

    def timetable(self) -> Sentence:
        """The train leaves tomorrow at half past seven."""
        verb, tags = self.pick(SCHEDULED)
        subject = self.noun_phrase(nouns_with(*tags), NOM, "plain")._replace(pronoun="")
        self.note("subject-verb", subject.noun.en if subject.noun else "", verb.key)
        kind = self.weighted({"present": 3, "past": 2, "future": 2})
        clause = Clause(subject, verb, kind == "past", WILL if kind == "future" else None)
        if self.chance(0.2):
            return *joined(tied("when", "wann"), (english(clause, "question"), german(clause, "first"))), "?"
        day = self.pick(DAYS[kind] + [(f"on {en}", f"am {de}") for en, de in WEEKDAYS])
        hour = self.hour()
        early = kind == "present" and day[0] != "today" and self.chance(0.5)
        clause.time = Phrase(*hour) if early else Phrase(*joined(paired(*day), hour))
        clause.future_present = clause.modal is WILL and self.chance(0.2)
        return *self.main(clause), "."

    def reported(self) -> Sentence:
        """Somebody says that ..., asks when ..."""
        verb, conjunctions = self.pick(SPEECH_VERBS)
        speaker, past = self.subject(), verb.en in ("say", "hear", "ask", "believe") and self.chance(0.35)
        conjunction = self.pick(conjunctions)
        before = 0 if conjunction == "when" or verb.en == "hope" else 4
        present = 4 * (verb.en != "hope")
        kind = "past" if past else self.weighted({"present": present, "past": before, "future": 3})
        subject = self.again(speaker) if verb.en in ("say", "hope") and self.chance(0.5) else None
        open_time, affirmative = conjunction == "when", conjunction in ("when", "whether")
        inner = self.inner(subject, kind, timed=not open_time, simple=open_time, affirmative=affirmative)
        if open_time and not {"modal", "year"} & {*inner.verb.extras}:
            raise Rejected
        if inner.verb.en == verb.en:
            raise Rejected
        if verb.en in ("say", "hear") and not past and speaker.pronoun in ("I", "we"):
            raise Rejected
        placed = "at:" in " ".join(inner.verb.extras)
        if verb.en == "hope" and (placed or (inner.modal and inner.modal.en not in ("will", "can", "could"))):
            raise Rejected
        if verb.en in ("hear", "ask", "know") and unmarked(inner.subject.en) == unmarked(speaker.en):
            raise Rejected
        head = Clause(speaker, verb, past)
        en, de, end = self.governed(head, (conjunction, CONJUNCTIONS[conjunction]), inner)
        if conjunction == "that" and self.focus not in FOCUSED:  # she says that he comes, she says he comes
            if self.chance(0.15):
                en = f"{english(head)} {english(inner)}"
            if verb.en in ("say", "believe", "hope") and not past and self.chance(0.2):
                de = f"{german(head)}, {german(inner)}"
        return en, de, end

    def governed(self, main: Clause, conjunction: Pair, inner: Clause, *, front: bool = False) -> Sentence:
        """A main clause and a subordinate one, either of them first."""
        return self.spelled_out(main, conjunction, (english(inner), self.last(inner)), front=front)

    def spelled_out(self, main: Clause, conjunction: Pair, inner: Pair, *, front: bool) -> Sentence:
        """The same around a clause that is spelled out already."""
        inner_en, inner_de = joined(paired(*conjunction), inner)
        if front:
            return f"{inner_en}, {english(main)}", f"{inner_de}, {german(main, 'first')}", "."
        return f"{english(main)} {inner_en}", f"{german(main)}, {inner_de}", "."

    def reason(self, because: bool, *, front: bool = False) -> Pair:
        if not because:
            return "although", "obwohl"
        return "because", "da" if self.chance(0.5 if front else 0.1) else "weil"

    def mood(self) -> Sentence:
        """Anna is happy because her uncle called her."""
        mood, past, because = self.pick(list(MOODS)), self.chance(0.4), self.chance(0.65)
        person = self.subject(full=self.chance(0.6))
        main = self.be(person, (mood,), past=past)
        main.negated = False
        same = mood in ("tired", "proud", "nervous") or self.chance(0.4)
        kind = "present" if mood == "nervous" and not past else "past"
        among, again = MOODS[mood][not because], self.again(person) if same else None
        inner = self.inner(again, kind, among, affirmative=True, timed=False)
        if inner.modal:
            raise Rejected
        front = self.chance(0.2)
        return self.governed(main, self.reason(because, front=front), inner, front=front)

    def cause(self) -> Sentence:
        """Anna is eating a roll because she is hungry; Peter is swimming although it is raining."""
        cause, because = self.pick(list(CAUSES)), self.chance(0.6)
        kind = self.pick(["present", "past"])
        person = self.subject()
        main = self.action(person, kind, CAUSES[cause][not because], plain=True, affirmative=True, timed=False)
        past = kind == "past"
        front = self.chance(0.25)
        conjunction = self.reason(because, front=front)
        if cause in ("good", "bad"):
            return self.spelled_out(main, conjunction, self.weather(cause, past), front=front)
        inner = self.be(self.again(person), (cause,), past=past, known=person.en)
        inner.negated = False
        return self.governed(main, conjunction, inner, front=front)

    def weather(self, quality: str, past: bool) -> Pair:
        _, en, en_past, de, de_past = self.pick([weather for weather in WEATHER if weather[0] == quality])
        words, wörter = (en_past, de_past) if past else (en, de)
        subject = 1 if words.startswith("it ") else 2  # it, the weather, the sun
        said, gesagt = words.split()[subject:], wörter.split()[subject:]
        if len(gesagt) == len(said):  # "is bad", schlecht ist
            predicate = paired(join(*said), join(*reversed(gesagt)))
            predicate = predicate[0], join(*reversed(predicate[1].split()))
        else:
            predicate = tied(join(*said), join(*gesagt))
        return joined(paired(join(*words.split()[:subject]), join(*wörter.split()[:subject])), predicate)

    def condition(self) -> Sentence:
        """If, when or before something happens, ..."""
        word = self.pick(["if", "if", "when", "before"])
        person, front = self.subject(), self.chance(0.5)
        falls = "falls" if self.chance(0.15) else "wenn"
        if word == "if" and self.focus not in FOCUSED and self.chance(0.3):
            quality = self.pick(["good", "bad"])
            main = self.action(person, "future", CAUSES[quality][0], plain=True, timed=False)
            return self.spelled_out(main, ("if", falls), self.weather(quality, False), front=front)
        kind = self.pick(["present", "future"] if word == "if" else ["present", "past", "future"])
        again = self.again(person) if self.chance(0.6 if word == "before" else 0.2) else None
        main = self.action(person, kind, REACTIONS, timed=False, simple=True, affirmative=word != "if")
        among = DEPARTURES if word == "before" and again else OCCASIONS
        past = kind == "past"
        inner = self.inner(again, "past" if past else "present", among, timed=False, affirmative=True, simple=True)
        if inner.verb.key == main.verb.key:
            raise Rejected
        german_word = {"if": falls, "when": "als" if past else "wenn", "before": "bevor"}[word]
        return self.governed(main, (word, german_word), inner, front=front)

    def meanwhile(self) -> Sentence:
        """While Anna sleeps, Peter works."""
        kind = self.pick(["present", "past"])
        main, inner = (
            self.action(subject, kind, ACTIVITIES, timed=False, affirmative=True, simple=True)
            for subject in (self.subject(), self.subject(pronouns="I we"))
        )
        if inner.modal or main.modal or inner.verb.key == main.verb.key:
            raise Rejected
        if unmarked(inner.subject.en) == unmarked(main.subject.en):
            raise Rejected
        main.progressive = inner.progressive = kind == "present" and self.chance(0.5)
        return self.governed(main, ("while", "während"), inner, front=self.chance(0.5))

    def opinion(self) -> Sentence:
        """The woman buys the lamp because it is cheap: the pronoun has the gender of the lamp."""
        key = self.pick(list(OPINIONS))
        main = self.action(self.subject(), "", (key,), plain=True, timed=False)
        thing = main.objects[-1]
        if thing.noun is None or "person" in thing.noun.tags:
            raise Rejected
        past = main.past or (main.modal is not None and main.modal.kind == "past")
        because, negated = self.chance(0.6), self.chance(0.2)
        quality = OPINIONS[key][because == negated]
        inner = self.be(self.it(thing)._replace(noun=thing.noun), quality, past=past, known=thing.en)
        inner.negated = negated
        return self.governed(main, self.reason(because), inner)

    def related(self) -> Sentence:
        """A relative clause on the subject or on the object."""
        if self.chance(0.5):
            return *self.main(self.action(related=True)), "."
        verb = self.pick(VERBS)
        subject = self.noun_phrase(nouns_with(*verb.subjects), NOM, "subject")
        if subject.noun is None or "jede" in subject.de:
            raise Rejected
        kind = self.pick(["present", "past", "future"])
        en, de = self.relative(subject.noun, subject.agreement, verb, kind)
        subject = subject._replace(en=f"{subject.en} {en}", de=f"{subject.de}{de}")
        return *self.main(self.clause(verb, subject, kind, plain=True, timed=False)), "."

    def sequence(self) -> Sentence:
        """One subject, two verbs, of which the second shares an auxiliary where it can."""
        subject = self.subject()
        kind, way = self.pick(["present", "past"]), self.pick(list(PURPOSES))
        choices: list[tuple[Sequence[str], Sequence[str]]] = [
            ([way], PURPOSES[way]),
            (ACTIVITIES, ACTIVITIES),
            (REACTIONS, REACTIONS),
        ]
        one, other = self.pick(choices)
        first = self.action(subject, kind, one, simple=True)
        second = self.action(subject, kind, other, plain=True, timed=False, simple=True)
        if first.verb.key == second.verb.key:
            raise Rejected
        if any(clause.negated or clause.modal or clause.progressive for clause in (first, second)):
            raise Rejected
        bare = replace(second, subject=NOTHING._replace(agreement=subject.agreement))
        shared = second.past and first.verb.sein == second.verb.sein
        en, de = self.main(first, front=1)
        und = tied("and", "und")
        rest = english(bare), german(second, "shared" if shared else "headless")
        return *joined((en, de), und, rest), "."

    def opposition(self) -> Sentence:
        """Anna works, but Peter sleeps."""
        kind = self.pick(["present", "past"])
        first = self.action(self.subject(), kind, ACTIVITIES, affirmative=True)
        second = self.action(self.subject(pronouns="I we"), kind, ACTIVITIES, timed=False)
        if (
            unmarked(first.subject.en) == unmarked(second.subject.en)
            or (first.verb.key == second.verb.key) != second.negated
        ):
            raise Rejected
        second.progressive = first.progressive and second.modal is None
        if first.modal or second.modal:
            raise Rejected
        (en1, de1), (en2, de2) = self.main(first), self.main(second)
        but, aber = tied("but", "aber")
        return f"{en1}, {but} {en2}", f"{de1}, {aber} {de2}", "."

    def purpose(self) -> Sentence:
        subject = self.subject()
        way = self.pick(list(PURPOSES))
        main = self.action(subject, "", (way,), plain=True, simple=True)
        inner = self.action(subject, "present", PURPOSES[way], plain=True, timed=False, simple=True)
        en, de = self.main(main, front=1)
        to, um = tied("in order to" if self.chance(0.7) else "to", "um")
        return f"{en} {to} {english(inner, 'infinitive')}", f"{de}, {um} {german(inner, 'infinitive')}", "."


Sentence = tuple[str, str, str]
Template = Callable[[Grammar], Sentence]

ADULT = frozenset({"person", "adult"})
PERSONAL = [verb for verb in VERBS if not ADULT.isdisjoint(verb.subjects)]
BEARERS = [v for v in VERBS if v.frame in (ACC, DAT, "dat+acc") and not re.search("to:|state", " ".join(v.extras))]
RELATABLE = [verb for verb in VERBS if verb.frame in (ACC, "dat+acc")]
OWNED = ("kin", "tame")
BELONGING = [verb for verb in VERBS if not {"person", "tame", "adult"}.isdisjoint(verb.subjects)]
THINGS = ("thing", "clothing", "furniture", "machine")
DESCRIBED = (*THINGS, "person", "animal", "food", "drink", "text", "event", "opening", "place")
# What is found where; the last tells whether there may be dozens
SCENES = [("furniture", "room", False), ("upright", "kitchen", False), ("tame", "tended", False)]
SCENES += [
    ("person", "work", True),
    ("landmark", "town", False),
    ("bound", "library", True),
    ("feast", "town", False),
]
ACTIVITIES = listed("work, sleep, dance, sing, read, cook, bake, write, eat, drink, rest, tidy ~up, swim")
OCCASIONS = listed("call, come back, arrive, visit, invite, find, get up, fall asleep, help")
DEPARTURES = listed("sleep, fall asleep, travel, fly, work, eat, dance, get up")
REACTIONS = listed(
    "cook, bake, call, help, thank, pack, open, close, turn ~on, turn ~off, tidy ~up, pick ~up, feed, show"
)
REACTIONS += listed(
    "apologise to, say goodbye to, give, tell, dance, laugh, rest, get changed, hurry, look for, put ~on"
)
REACTIONS += listed("wash, congratulate, bring ~back, repair, read, order")
UNASKED = ("see", "find", "meet", "fly", "travel", "come", "sit", "stand", "remember", "think of", "sell")
ABSOLUTE = ("round", "ripe", "wonderful", "delicious")  # not with very
DAYS = {"present": [("every day", "jeden Tag"), ("today", "heute")], "past": [("yesterday", "gestern")]}
DAYS["future"] = [("tomorrow", "morgen"), ("the day after tomorrow", "übermorgen")]
ASKABLE = {
    "when": PERSONAL,
    "why": PERSONAL,
    "where": [verb for verb in PERSONAL if "in=" in " ".join(verb.extras) and "in=place!" not in verb.extras],
    "what": [v for v in PERSONAL if v.frame == ACC and not {"person", "animal", "tame"} & {*v.objects}],
    "whom": [v for v in PERSONAL if v.frame in (ACC, DAT) and "person" in v.objects],
}

TEMPLATES: dict[Template, float] = {
    Grammar.statement: 18,
    Grammar.question: 5,
    Grammar.wh_question: 5,
    Grammar.request: 3,
    Grammar.description: 4,
    Grammar.contrast: 3,
    Grammar.cost: 4,
    Grammar.existence: 3,
    Grammar.timetable: 4,
    Grammar.reported: 10,
    Grammar.mood: 5,
    Grammar.cause: 5,
    Grammar.condition: 7,
    Grammar.meanwhile: 2,
    Grammar.opinion: 6,
    Grammar.related: 12,
    Grammar.sequence: 5,
    Grammar.opposition: 4,
    Grammar.purpose: 6,
}
# Where only some sentences can show a class, try no others.
FOCUSED: dict[str, dict[Template, float]] = {
    "pronoun": {Grammar.contrast: 1, Grammar.opinion: 2},
    "separable verb": {Grammar.reported: 2, Grammar.condition: 2, Grammar.related: 1},
    "relative clause": {Grammar.reported: 2, Grammar.condition: 2},
}


def words(text: str) -> list[str]:
    """The words made of letters; numbers are free to be new."""
    return re.findall(r"[^\W\d_]+(?:['-][^\W\d_]+)*", text)


class Aligned(NamedTuple):
    """A sentence pair, and which of its words say the same."""

    en: str
    de: str
    links: str


def generate() -> dict[str, list[Aligned]]:
    """All splits. No sentence, English or German, occurs twice in all of them together."""
    grammar = Grammar(SEED)
    seen: set[str] = set()

    def fresh(known: set[str] | None = None) -> Aligned:
        while True:
            en_marked, de_marked = grammar.pair()
            en, de = unmarked(en_marked), unmarked(de_marked)
            if en in seen or de in seen or not 4 <= len(en.split()) <= 24:
                continue
            if known is not None and not known.issuperset(words(en) + words(de)):
                continue
            seen.update((en, de))
            return Aligned(en, de, links(en_marked, de_marked))

    splits = {split: [fresh() for _ in range(size)] for split, size in SIZES.items()}
    known = {word for pair in splits["train"] for side in (pair.en, pair.de) for word in words(side)}
    splits["test_compositional"] = []
    for grammar.focus, size in CLASSES.items():
        splits["test_compositional"] += [fresh(known | NEW_FORMS.get(grammar.focus, set())) for _ in range(size)]
    return splits


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Write the demo corpus.")
    parser.add_argument("out", nargs="?", type=Path, default=Path(__file__).resolve().parents[1] / "data" / "demo")
    out: Path = parser.parse_args(arguments).out
    out.mkdir(parents=True, exist_ok=True)
    Marks.is_on = True
    try:
        splits = generate()
    finally:
        Marks.is_on = False
    for split, pairs in splits.items():
        for side, ending in enumerate(("en", "de", "align")):
            if split == "train" and ending == "align":
                continue  # nothing needs them
            text = "".join(pair[side] + "\n" for pair in pairs)
            (out / f"{split}.{ending}").write_text(text, encoding="utf-8", newline="\n")
    counts = ", ".join(f"{split} {len(pairs)}" for split, pairs in splits.items())
    sys.stdout.write(f"{out}: {counts} sentence pairs\n")


if __name__ == "__main__":
    main(sys.argv[1:])
