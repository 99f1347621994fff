"""Write the demo corpus: English-German sentence pairs from a synchronous grammar.

One derivation yields both languages: a clause is first chosen as a structure (subject, verb, objects, tense, ...) and
then spelled out by two linearisers. The words are in demo_lexicon.py. Some combinations of known words are held out
of train, dev and test; every sentence of test_compositional contains at least one of them (see data/README.md).

    python scripts/make_demo.py [OUT_DIR]
"""

from __future__ import annotations

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
    NAMES,
    NO_DATIVE_PLURAL,
    NO_PRONOUN,
    NO_SUBORDINATE,
    NOM,
    NOUNS,
    NUMBERS,
    PAY,
    PREPOSITIONS,
    PRONOUNS,
    RELATIVE,
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
    contract,
    determiner,
    english_s,
    number,
    price,
)

SEED = 20170612
SIZES = {"train": 20_000, "dev": 500, "test": 500}
PER_CLASS = 50  # sentences of each held-out class in test_compositional
HELD_OUT_SHARE = 9  # one pair in so many is held out, for the classes that are pairs
# The order is that of the blocks in test_compositional.
CLASSES = (
    "adjective-noun",
    "verb-object",
    "subject-verb",
    "modal-verb",
    "preposition-noun",
    "date",
    "dative plural",
    "pronoun",
    "separable verb",
    "relative clause",
)
# Held out because of a word form: here the form itself (Kindern, anruft) is new, although the lemma is known.
NEW_FORMS = ("dative plural", "separable verb")

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
    tail: Pair = ("", "")  # a relative clause, which German moves to the end of its clause


NOTHING = Phrase("", "")


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

    @property
    def nicht(self) -> str:
        return "nicht" if self.negated and not any(phrase.negative for phrase in self.objects) else ""

    @property
    def tail(self) -> Pair:
        return self.objects[-1].tail if self.objects else ("", "")


@cache
def nouns_with(*tags: str) -> tuple[Noun, ...]:
    return tuple(noun for noun in NOUNS if not noun.tags.isdisjoint(tags))


@cache
def adjectives_for(noun: Noun, tag: str = "", without: str = "") -> tuple[Adjective, ...]:
    """The adjectives that may modify the noun; with or without a tag such as "mood" or "colour"."""
    fitting = (adjective for adjective in ADJECTIVES if not adjective.tags.isdisjoint(noun.tags))
    return tuple(a for a in fitting if (not tag or tag in a.tags) and (not without or without not in a.tags))


@cache
def held_out(kind: str, *key: str) -> bool:
    """Whether a combination belongs to the compositional test set alone. Named sets where a class is small, a fixed
    hash of the names where it consists of pairs."""
    if kind == "dative plural":
        return key[0] in NO_DATIVE_PLURAL
    if kind == "pronoun":
        return key[0] in NO_PRONOUN
    if kind == "separable verb":
        return key[0] in NO_SUBORDINATE
    if kind == "relative clause":
        return True
    return zlib.crc32(":".join((kind, *key)).encode()) % HELD_OUT_SHARE == 0


# Linearisation


def join(*parts: str) -> str:
    return " ".join(filter(None, parts))


def english(clause: Clause, order: str = "statement") -> str:
    """Spell out a clause. Orders: statement, question, infinitive, fronted (a statement after its time)."""
    verb, modal, agreement = clause.verb, clause.modal, clause.subject.agreement
    asks, no = order == "question", "not" if clause.negated else ""
    base = verb.en
    if order == "infinitive":
        finite, rest = "", base
    elif modal and modal.auxiliary:
        finite, rest = modal.en, join(no, base)
        if finite == "can" and no and not asks:
            finite, rest = "cannot", base
    elif verb is BE:
        finite, rest = BE_FORMS[agreement][1 if clause.past else 0], no
    else:
        head, tail = (modal.en.split()[0], "to " + base) if modal else (base, "")
        past = (modal is not None and modal.kind == "past") or clause.past
        if asks or no:
            finite, rest = "did" if past else "does" if agreement == "3s" else "do", join(no, head, tail)
        elif past:
            finite, rest = (modal.en_past.split()[0] if modal else verb.en_past), tail
        else:
            finite, rest = english_s(head) if agreement == "3s" else head, tail
    objects = join(*(phrase.en for phrase in clause.objects))
    if verb.particle:
        pronoun = bool(clause.objects) and clause.objects[-1].is_pronoun
        objects = join(objects, verb.particle) if pronoun else join(verb.particle, objects)
    subject = "" if order == "infinitive" else clause.subject.en
    core = (finite, subject, rest) if asks else (subject, finite, rest)
    first, last = (clause.time.en, "") if order == "fronted" else ("", clause.time.en)
    return join(first, *core, verb.rest, objects, clause.adjunct.en, clause.tail[0], last)


def german_verb(clause: Clause) -> tuple[str, str, str]:
    """The finite verb, what closes the clause when it comes second, and both together when it comes last."""
    verb, agreement = clause.verb, clause.subject.agreement
    if clause.modal:
        infinitive, finite = verb.prefix + verb.infinitive, clause.modal.de[agreement]
        return finite, infinitive, join(infinitive, finite)
    if clause.past and verb.preterite:
        finite = verb.preterite + ("" if agreement != "pl" else "n" if verb.preterite.endswith("e") else "en")
        return finite, "", finite
    if clause.past:
        sein = {"1s": "bin", "3s": "ist", "pl": "sind"}
        finite = (sein if verb.sein else {"1s": "habe", "3s": "hat", "pl": "haben"})[agreement]
        return finite, verb.participle, join(verb.participle, finite)
    finite = BE_FORMS[agreement][2] if verb is BE else verb.present(agreement)
    return finite, verb.prefix, verb.prefix + finite


def german(clause: Clause, order: str = "second") -> str:
    """Spell out a clause. Orders: second (the subject first), fronted (the time first), first (the finite verb first),
    last (subordinate), infinitive (with zu), headless (shares the subject), shared (and the finite verb, too)."""
    finite, closing, both = german_verb(clause)
    time = "" if order == "fronted" else clause.time.de
    early = [phrase.de for phrase in clause.objects if phrase.noun is None]
    late = [phrase.de for phrase in clause.objects if phrase.noun]
    middle = join(*early, time, *late, clause.nicht, clause.adjunct.de)
    subject, tail = clause.subject.de, clause.tail[1]
    if order == "last":
        return join(subject, middle, both, tail)
    if order == "infinitive":
        return join(middle, clause.verb.zu_infinitive, tail)
    if order in ("headless", "shared"):
        return join(finite if order == "headless" else "", middle, closing, tail)
    opening = {"second": (subject, finite), "fronted": (clause.time.de, finite, subject), "first": (finite, subject)}
    return join(*opening[order], middle, closing, tail)


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
        """One sentence pair: of the focus class, or free of everything held out."""
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
        en, de, _ = PRONOUNS[owner]
        possessive, numeral = (en[2], de[3], "ein"), (*number(self.count(role == "new")), "none")
        the, indefinite = ("the", "", "der"), ("", "", "none") if noun.mass or plural else ("a", "ein", "ein")
        many, some = ("many", "viel", "viel"), ("some", "einig", "viel")
        this, owned = ("these" if plural else "this", "dies", "dies"), 0 if "unowned" in noun.tags else 1
        if role == "negated":
            none = ("any", "kein", "ein") if noun.mass or plural else ("a", "kein", "ein")
            return self.weighted({the: 5, possessive: 2 * owned, none: 5})
        if role == "new":
            if "kin" in noun.tags:
                raise Rejected
            return self.weighted({numeral: 4, many: 2, some: 1}) if plural else indefinite
        if noun.mass:
            return self.weighted({the: 1, indefinite: 2})
        if "kin" in noun.tags or role in ("place", "topic"):
            return self.weighted({the: 5, possessive: 2 * owned, this: 0.4})
        subject = role == "subject"
        if plural:
            bare = 0 if subject else 1.5
            return self.weighted({the: 5, possessive: 1.5 * owned, this: 1, numeral: 1.5, some: 0.5, indefinite: bare})
        every = ("every", "jed", "dies")
        return self.weighted({the: 6, indefinite: 2.5, possessive: 1.5 * owned, this: 0.8, every: 0.4 * subject})

    def count(self, large: bool) -> int:
        if large and self.chance(0.4):
            return 13 + self.below(87)
        return 2 + (self.below(4) if self.chance(0.7) else self.below(11))

    def modifiers(self, noun: Noun, probability: float) -> list[Adjective]:
        if not self.chance(probability):
            return []
        adjectives = [self.pick(adjectives_for(noun))]
        if "size" in adjectives[0].tags and "coloured" in noun.tags and self.chance(0.3):
            adjectives.append(self.pick(adjectives_for(noun, "colour")))
        for adjective in adjectives:
            self.note("adjective-noun", adjective.en, noun.en)
        return adjectives

    def noun_phrase(self, nouns: Sequence[Noun], case: str, role: str = "object", owner: str = "I") -> Phrase:
        """A noun with its article and adjectives. Roles: subject, object, topic (definite), place (rarely plural),
        negated (the object of a negated verb), new (indefinite), plain (singular, definite)."""
        noun = self.new(nouns)
        focused = case == DAT and self.focus == "dative plural"
        plural = not noun.mass and role != "plain" and (focused or self.chance(0.05 if role == "place" else 0.3))
        if plural and case == DAT:
            self.note("dative plural", noun.en)
        gender = "p" if plural else noun.gender
        en, stem, kind = ("the", "", "der") if role == "plain" else self.article_words(noun, plural, role, owner)
        adjectives = self.modifiers(noun, 0.15 if role == "plain" else 0.58)
        possessor = NOTHING
        if kind == "der" and role != "plain" and "person" not in noun.tags and self.chance(0.07):
            possessor = self.possessor()
            en, kind = possessor.en + "'s", kind if possessor.noun else "none"
        words = join(*(adjective.en for adjective in adjectives), noun.english(plural))
        endings = DECLENSION[kind][gender]
        return Phrase(
            join(article(words) if en == "a" else en, words),
            join(
                possessor.de if kind == "none" and possessor.de else determiner(stem, kind, gender, case),
                *(adjective.stem + endings[case] for adjective in adjectives),
                noun.german(plural, case),
                possessor.de if kind == "der" else "",
            ),
            agreement="pl" if plural else "3s",
            pronoun="they" if plural else {"m": "he", "f": "she"}.get(noun.gender, ""),
            noun=noun,
            negative=stem == "kein",
        )

    def possessor(self) -> Phrase:
        """The teacher's, Anna's: a genitive after or a name before the noun."""
        if self.chance(0.4):
            name = self.new(list(NAMES))
            return Phrase(name, name + "s")
        return self.noun_phrase(nouns_with("person"), GEN, "plain")

    def pronoun(self, choices: str) -> Phrase:
        (en, *_), (de, *_), agreement = PRONOUNS[self.pick(choices.split())]
        return Phrase(en, de, agreement, pronoun=en, is_pronoun=True)

    def name(self) -> Phrase:
        name = self.new(list(NAMES))
        return Phrase(name, name, pronoun=NAMES[name])

    def subject(
        self, tags: Sequence[str] = ("person",), *, full: bool = False, pronouns: str = "I he she we they"
    ) -> Phrase:
        """Full: no pronoun."""
        if "person" in tags:
            kind = self.weighted({"pronoun": 0.0001 if full else 3.0, "name": 2.0, "noun": 7.0})
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
        return Phrase("it", {"m": "er", "f": "sie", "n": "es"}[phrase.noun.gender], is_pronoun=True)

    def object(self, verb: Verb, case: str, subject: Phrase, role: str) -> Phrase:
        if "person" in verb.objects and self.chance(0.3) and role != "related":
            choice = self.pick(["name", "I", "he", "she", "we", "they"])
            if choice == "name":
                return self.name()
            if choice != subject.pronoun:
                en, de, _ = PRONOUNS[choice]
                return Phrase(en[1], de[2 if case == DAT else 1], is_pronoun=True)
        owner = subject.pronoun or "I"
        phrase = self.noun_phrase(nouns_with(*verb.objects), case, role, owner)
        if phrase.noun:
            self.note("verb-object", verb.key, phrase.noun.en)
        return phrase

    def prepositional(self, relation: str, owner: str = "I", tags: Sequence[str] = ()) -> Phrase:
        preposition, case, usual = PREPOSITIONS[relation]
        if relation in ("with", "for") and self.chance(0.25):
            phrase = self.name()
        else:
            role = {"during": "plain", "with": "object", "for": "object"}.get(relation, "place")
            phrase = self.noun_phrase(nouns_with(*(tags or usual)), case, role, owner)
        if phrase.noun:
            self.note("preposition-noun", relation, phrase.noun.en)
        return Phrase(f"{relation} {phrase.en}", contract(preposition, phrase.de))

    def relative(self, noun: Noun, agreement: str, main: Verb) -> Pair:
        """A relative clause (subject, accusative or dative) on a noun, with a verb other than the main one."""
        gender = "p" if agreement == "pl" else noun.gender
        human = "person" in noun.tags
        acts = [verb for verb in VERBS if verb is not main and not noun.tags.isdisjoint(verb.subjects)]
        bears = [verb for verb in BEARERS if verb is not main and not noun.tags.isdisjoint(verb.objects)]
        if acts and (not bears or self.chance(0.5)):
            relative = Phrase("who" if human else "which", RELATIVE[gender][NOM], agreement, noun=noun)
            clause = self.clause(self.pick(acts), relative, plain=True)
        elif not bears:
            raise Rejected
        else:
            verb = self.pick(bears)
            self.note("verb-object", verb.key, noun.en)
            subject = self.subject(verb.subjects)
            clause = self.clause(verb, subject, plain=True, gap=True)
            pronoun = RELATIVE[gender][verb.frame]
            return join("whom" if human else "which", english(clause)), f", {pronoun} {self.last(clause)} ,"
        return english(clause), f", {self.last(clause)} ,"

    # Clauses

    def time(self, kind: str, verb: Verb) -> Phrase:
        yearly = "year" in verb.extras
        if kind != "present":
            form = self.weighted({"adverb": 6, "date": 40 if self.focus == "date" else 1.5, "day": 1.2, "count": 1})
            if form == "date":
                month, monat, days = self.pick(MONTHS)
                day = 1 + self.below(days)
                while self.focus == "date" and not held_out("date", str(day), month):
                    day = 1 + self.below(days)
                self.note("date", str(day), month)
                return Phrase(f"on {day} {month}", f"am {day}. {monat}")
            if form == "day":
                day_en, day_de = self.pick(WEEKDAYS)
                return Phrase(f"on {day_en}", f"am {day_de}")
            if form == "count":
                count_en, count_de = number(2 + self.below(18))
                unit, einheit = self.pick([("days", "Tagen"), ("weeks", "Wochen")])
                ago = Phrase(f"{count_en} {unit} ago", f"vor {count_de} {einheit}")
                return ago if kind == "past" else Phrase(f"in {count_en} {unit}", f"in {count_de} {einheit}")
        fitting = [(en, de) for en, de, kinds in TIMES if kind in kinds or (yearly and "yearly-" + kind in kinds)]
        en, de = self.pick(fitting)
        if en in ("tomorrow", "yesterday", "today", "every day") and not yearly and self.chance(0.3):
            hour = 6 + self.below(17)
            if hour < 12 and self.chance(0.4):  # half past seven is halb acht
                half, halb = NUMBERS[hour][0], NUMBERS[hour + 1][1]
                return Phrase(f"{en} at half past {half}", f"{de} um halb {halb}")
            return Phrase(f"{en} at {hour} o'clock" if hour < 13 else f"{en} at {hour}:00", f"{de} um {hour} Uhr")
        return Phrase(en, de)

    def adjunct(self, verb: Verb, subject: Phrase, *, optional: bool) -> Phrase:
        animal = subject.noun is not None and "animal" in subject.noun.tags
        person = subject.noun is None or "person" in subject.noun.tags
        owner = subject.pronoun or "I"
        required = [extra[:-1] for extra in verb.extras if extra.endswith("!")]
        possible = [extra for extra in verb.extras if extra in PREPOSITIONS or extra == "town"]
        if not required and not (optional and possible and self.chance(0.55)):
            return NOTHING
        kind = required[0] if required else self.pick(possible)
        if kind == "with" and not person:
            return NOTHING
        if kind in ("fly", "ride", "town"):
            city = self.pick(list(CITIES))
            there = Phrase(f"to {city}", f"nach {CITIES[city]}")
            if kind == "town":
                return Phrase(f"in {city}", f"in {CITIES[city]}")
            if kind == "ride" and self.chance(0.6):
                vehicle = self.pick(nouns_with("road"))
                by = f"mit {DER[vehicle.gender][DAT]} {vehicle.de}"
                return Phrase(f"{there.en} by {vehicle.en}", f"{by} {there.de}")
        else:
            if kind == "spot":
                kind = self.pick(["in", "on", "next to", *(["at", "behind"] if person else ["under"])])
            outdoor = animal and kind in ("in", "into")
            there = self.prepositional(kind, owner, ("outdoor",) if outdoor else ())
        if required and person and "with" in possible and self.chance(0.2):
            company = self.prepositional("with", owner)
            there = Phrase(f"{there.en} {company.en}", f"{company.de} {there.de}")
        return there

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
    ) -> Clause:
        """A clause around a verb. Kinds: present, past, future. Plain: short, not negated; gap: its last object has
        been moved out; related: its last object carries a relative clause."""
        kind = kind or self.weighted({"present": 4, "past": 4, "future": 3.5})
        if kind == "future" and "state" in verb.extras:
            raise Rejected
        past, modal = self.tense(kind, verb)
        if subject.noun:
            self.note("subject-verb", subject.noun.en, verb.key)
        if past and verb.en == verb.en_past and subject.agreement != "3s":
            raise Rejected  # "they read" would not tell its tense
        negated = not (plain or related or affirmative) and self.chance(0.14) and (modal is None or modal.negatable)
        clause = Clause(subject, verb, past, modal, negated)
        role = "related" if related else "negated" if negated else "object"
        preposition, _, case = verb.frame.rpartition("+")
        if verb.frame == "dat+acc":
            receiver = replace(verb, objects=("person",))
            clause.objects.append(self.object(receiver, DAT, subject, "object"))
            clause.objects.append(self.object(verb, ACC, subject, role))
        elif verb.frame != "-" and not gap:
            target = self.object(verb, case, subject, "topic" if preposition and negated else role)
            if preposition:
                target = target._replace(de=contract(preposition, target.de))
                clause.adjunct = Phrase(target.en, target.de)
            else:
                clause.objects.append(target)
        return self.complete(clause, kind, plain=plain, related=related, timed=timed)

    def complete(self, clause: Clause, kind: str, *, plain: bool, related: bool, timed: bool) -> Clause:
        """Add the adjunct, the time and a relative clause."""
        verb, last = clause.verb, clause.objects[-1] if clause.objects else NOTHING
        if related:
            if last.noun is None:
                raise Rejected
            clause.objects[-1] = last._replace(tail=self.relative(last.noun, last.agreement, verb))
        if clause.adjunct is NOTHING:
            clause.adjunct = self.adjunct(verb, clause.subject, optional=not plain and not related)
            if related and clause.adjunct is not NOTHING:
                raise Rejected
        movable = not related and not (clause.negated and clause.objects)  # else usage varies
        if timed and movable and "state" not in verb.extras and self.chance(0.2 if plain else 0.5):
            clause.time = self.time(kind, verb)
            if clause.negated and clause.time.en.startswith("every"):
                clause.time = NOTHING  # "not every day" means something else
        return clause

    def action(self, subject: Phrase | None = None, kind: str = "", **options: bool) -> Clause:
        """A clause around any verb that fits the subject (a person, if there is one)."""
        verbs = VERBS if subject is None else PERSONAL
        if options.get("related"):
            verbs = RELATABLE if subject is None else RELATABLE_PERSONAL
        verb = self.pick(verbs)
        return self.clause(verb, subject or self.subject(verb.subjects), kind, **options)

    def inner(self, subject: Phrase | None, kind: str, **options: bool) -> Clause:
        """A clause to be made subordinate; only the last test class has a relative clause within it."""
        related = self.focus == "relative clause"
        if related:
            self.note("relative clause")
        clause = self.action(subject, kind, related=related, **options)
        if clause.subject.en.startswith("every "):
            raise Rejected
        return clause

    def last(self, clause: Clause) -> str:
        """The verb-final German of a clause."""
        if clause.verb.prefix:
            self.note("separable verb", clause.verb.key)
        return german(clause, "last")

    def be(self, subject: Phrase, *, past: bool = False, mood: str = "", without: str = "", known: str = "") -> Clause:
        """The subject, of which something may be known already, is tired, is not very big."""
        noun = subject.noun or NOUNS[0]
        adjective = self.pick(adjectives_for(noun, mood, without))
        if not adjective.clash.isdisjoint((known or subject.en).split()):
            raise Rejected
        if subject.noun and subject.is_pronoun and held_out("adjective-noun", adjective.en, subject.noun.en):
            raise Rejected  # neither seen nor a fair example
        if subject.noun and not subject.is_pronoun:
            self.note("adjective-noun", adjective.en, subject.noun.en)
        negated, very = self.chance(0.15), self.chance(0.25) and not {"colour", "device"} & adjective.tags
        predicate = Phrase(join("very" if very else "", adjective.en), join("sehr" if very else "", adjective.de))
        return Clause(subject, BE, past, None, negated, adjunct=predicate)

    # Sentences: English, German, end mark

    def statement(self) -> Sentence:
        return *self.main(self.action()), "."

    def main(self, clause: Clause, *, front: float = 0.45) -> Pair:
        if clause.time is not NOTHING and self.chance(front):
            return english(clause, "fronted"), german(clause, "fronted")
        return english(clause), german(clause)

    def question(self) -> Sentence:
        verb = self.pick(PERSONAL)
        clause = self.clause(verb, self.subject(pronouns="you you he she we they"))
        clause.negated = clause.negated and any(phrase.negative for phrase in clause.objects)
        return english(clause, "question"), german(clause, "first"), "?"

    def wh_question(self) -> Sentence:
        word = self.pick(["who", "when", "why", "where", "what", "how many"])
        if word == "who":
            verb = self.pick(PERSONAL)
            clause = self.clause(verb, Phrase("who", "wer"))
            return english(clause), german(clause), "?"
        if word == "how many":
            things, place = self.pick(SCENES)
            noun, there = self.pick(nouns_with(things)), self.prepositional("in", tags=(place,))
            many, viele = f"how many {noun.en_plural}", f"wie viele {noun.de_plural}"
            return f"{many} are there {there.en}", f"{viele} gibt es {there.de}", "?"
        if word == "what":
            verb = self.pick(ASKABLE)
        else:
            verb = self.pick([v for v in PERSONAL if word != "where" or "in" in v.extras])
        subject = self.subject(pronouns="you you he she we they")
        clause = self.clause(verb, subject, plain=True, gap=word == "what", timed=word != "when")
        german_word = {"when": "wann", "why": "warum", "where": "wo", "what": "was"}[word]
        return join(word, english(clause, "question")), join(german_word, german(clause, "first")), "?"

    def request(self) -> Sentence:
        verb = self.pick([verb for verb in PERSONAL if "modal" in verb.extras and verb.en not in ("see", "find")])
        clause = self.clause(verb, Phrase("", "Sie", "pl", pronoun="you"), "present", plain=True, timed=False)
        return join("please", english(clause)), join("bitte", german(clause, "first")), "."

    def description(self) -> Sentence:
        subject = self.noun_phrase(nouns_with(*DESCRIBED), NOM, "topic")
        past = self.chance(0.3)
        if subject.noun and "person" in subject.noun.tags and self.chance(0.4):
            if re.search("young|old", subject.en):
                raise Rejected
            en, de = number(3 + self.below(15) if "young" in subject.noun.tags else 20 + self.below(70))
            clause = Clause(subject, BE, adjunct=Phrase(f"{en} years old", f"{de} Jahre alt"))
        else:
            clause = self.be(subject, past=past)
            if self.chance(0.25) and subject.noun and subject.noun.tags.isdisjoint(("person", "animal", "place")):
                there = self.prepositional("in", tags=("room",))
                clause.subject = subject._replace(en=join(subject.en, there.en), de=join(subject.de, there.de))
        return *self.main(clause), "."

    def contrast(self) -> Sentence:
        """The lamp is old, but it is not expensive."""
        subject = self.noun_phrase(nouns_with(*THINGS), NOM, "topic")
        first = self.be(subject)
        known = f"{subject.en} {first.adjunct.en}"
        second = self.be(self.it(subject)._replace(noun=subject.noun), without="colour", known=known)
        second.negated, first.negated = True, False
        return f"{english(first)}, but {english(second)}", f"{german(first)}, aber {german(second)}", "."

    def cost(self) -> Sentence:
        noun = self.new(nouns_with("ware", "machine"))
        self.used.clear()
        amount = Phrase(*price(self.cents(noun)))
        if self.chance(0.35):
            payer = self.subject()
            goods = self.noun_phrase([noun], ACC, owner=payer.pronoun or "I")
            purchase = Phrase(f"for {goods.en}", f"für {goods.de}")
            clause = Clause(payer, PAY, past=True, objects=[amount], adjunct=purchase)
            if self.chance(0.4):
                clause.time = self.time("past", VERBS[0])
            return *self.main(clause, front=1), "."
        clause = Clause(self.noun_phrase([noun], NOM, "topic"), COST)
        if self.chance(0.15):
            return f"how much {english(clause, 'question')}", f"wie viel {german(clause, 'first')}", "?"
        if self.chance(0.25):
            amount = Phrase(f"only {amount.en}", f"nur {amount.de}")
        clause.objects.append(amount)
        return *self.main(clause), "."

    def cents(self, noun: Noun) -> int:
        if "food" in noun.tags:
            return 100 + 5 * self.below(180)
        if "vehicle" in noun.tags:
            return 100_000 * (1 + self.below(30)) + 5_000 * self.below(20)
        if self.chance(0.4):
            return 100 * (5 + self.below(395))
        return 10 * (30 + self.below(970))

    def existence(self) -> Sentence:
        things, place = self.pick(SCENES)
        past = self.chance(0.25)
        thing = self.noun_phrase(nouns_with(things), ACC, "new")
        there = self.prepositional("in", tags=(place,))
        verb = BE_FORMS[thing.agreement][past]
        return f"there {verb} {thing.en} {there.en}", f"{there.de} {'gab' if past else 'gibt'} es {thing.de}", "."

    def reported(self) -> Sentence:
        """Somebody says that ..., asks when ..."""
        verb, conjunctions = self.pick(SPEECH_VERBS)
        speaker, past = self.subject(), verb.en in ("say", "hear", "ask", "believe") and self.chance(0.35)
        conjunction = self.pick(conjunctions)
        before = 0 if conjunction == "when" or verb.en == "hope" else 4
        kind = "past" if past else self.weighted({"present": 4, "past": before, "future": 3})
        subject = self.again(speaker) if self.chance(0.3) else None
        inner = self.inner(subject, kind, timed=conjunction != "when")
        if verb.en == "hope" and inner.modal and inner.modal.en in ("must", "should", "may"):
            raise Rejected
        head = Clause(speaker, verb, past)
        return self.governed(head, conjunction, CONJUNCTIONS[conjunction], inner)

    def governed(self, main: Clause, en: str, de: str, inner: Clause, *, front: bool = False) -> Sentence:
        """A main clause and a subordinate one, either of them first."""
        inner_en, inner_de = f"{en} {english(inner)}", f"{de} {self.last(inner)}"
        if front:
            return f"{inner_en}, {english(main)}", f"{inner_de}, {german(main, 'first')}", "."
        return f"{english(main)} {inner_en}", f"{german(main)}, {inner_de}", "."

    def reason(self) -> Sentence:
        """Because or although of a mood, of the weather, or of what somebody did."""
        conjunction = self.pick(REASONS)
        kind = self.weighted({"present": 3, "past": 4, "future": 2})
        form = "action" if self.focus in FOCUSED else self.pick(["mood", "weather", "action", "action"])
        if form == "action":  # Anna is happy because the uncle has called her
            person = self.subject(full=self.chance(0.6))
            past = self.chance(0.3)
            main = self.be(person, past=past, mood="mood")
            main.negated = False
            if main.adjunct.en.split()[-1] not in ("happy", "sad", "angry", "tired"):
                raise Rejected
            inner = self.inner(self.again(person) if self.chance(0.35) else None, "past" if past else kind)
            return self.governed(main, *conjunction, inner, front=self.chance(0.2))
        person = self.subject()
        main = self.action(person, kind, timed=False)
        past = kind == "past"
        if form == "mood":
            inner = self.be(self.again(person), past=past, mood="mood", known=person.en)
            return self.governed(main, *conjunction, inner, front=self.chance(0.25))
        weather_en, weather_de = self.weather(past)
        return f"{english(main)} {conjunction[0]} {weather_en}", f"{german(main)}, {conjunction[1]} {weather_de}", "."

    def weather(self, past: bool) -> Pair:
        en, en_past, de, de_past = self.pick(WEATHER)
        return (en_past, de_past) if past else (en, de)

    def condition(self) -> Sentence:
        """If, when or before something happens, ..."""
        word = self.pick(["if", "if", "when", "before"])
        kind = self.pick(["present", "future"]) if word == "if" or self.chance(0.5) else "past"
        person = self.subject()
        main = self.action(person, kind, timed=False)
        if word == "if" and self.focus not in FOCUSED and self.chance(0.3):
            en, de = self.weather(False)
            return f"if {en}, {english(main)}", f"wenn {de}, {german(main, 'first')}", "."
        german_word = {"if": "wenn", "before": "bevor", "when": "als" if kind == "past" else "wenn"}[word]
        same = self.chance(0.6 if word == "before" else 0.2)
        again, kind = self.again(person) if same else None, "past" if kind == "past" else "present"
        inner = self.inner(again, kind, timed=False, affirmative=word != "if")
        return self.governed(main, word, german_word, inner, front=self.chance(0.5))

    def opinion(self) -> Sentence:
        """The woman buys the lamp because it is cheap: the pronoun has the gender of the lamp."""
        verb = self.pick([verb for verb in PERSONAL if verb.key in OPINION_VERBS])
        main = self.clause(verb, self.subject(), plain=True, timed=False)
        thing = main.objects[-1]
        if thing.noun is None or "person" in thing.noun.tags or thing.is_pronoun:
            raise Rejected
        past = main.past or (main.modal is not None and main.modal.kind == "past")
        inner = self.be(self.it(thing)._replace(noun=thing.noun), past=past, without="colour", known=thing.en)
        quality = inner.adjunct.en.split()[-1]
        if quality in MERITS or quality in FLAWS:  # a merit is a reason to buy, a flaw to sell
            wanted = (quality in MERITS) != inner.negated
            reason = REASONS[0 if wanted != (main.verb.key in ("sell", "throw ~away")) else 1]
        else:
            reason = self.pick(REASONS)
        return self.governed(main, *reason, inner)

    def related(self) -> Sentence:
        """A relative clause on the subject or on the object."""
        if self.chance(0.5):
            return *self.main(self.action(related=True)), "."
        verb = self.pick(VERBS)
        subject = self.noun_phrase(nouns_with(*verb.subjects), NOM, "subject")
        if subject.noun is None or "jede" in subject.de:
            raise Rejected
        en, de = self.relative(subject.noun, subject.agreement, verb)
        subject = subject._replace(en=f"{subject.en} {en}", de=f"{subject.de}{de}")
        return *self.main(self.clause(verb, subject, plain=True, timed=False)), "."

    def sequence(self) -> Sentence:
        """One subject, two verbs."""
        subject = self.subject()
        kind = self.pick(["present", "past"])
        first, second = (self.action(subject, kind, timed=not index) for index in range(2))
        clauses = (first, second)
        if first.verb is second.verb or any(c.negated or c.modal or c.verb.preterite for c in clauses):
            raise Rejected
        if kind == "past" and first.verb.sein != second.verb.sein:
            raise Rejected
        bare = Clause(NOTHING._replace(agreement=subject.agreement), second.verb, second.past, None, False)
        bare.objects, bare.adjunct = second.objects, second.adjunct
        en, de = self.main(first, front=1)
        return f"{en} and {english(bare)}", f"{de} und {german(second, 'shared' if second.past else 'headless')}", "."

    def opposition(self) -> Sentence:
        """Anna works, but Peter sleeps."""
        kind = self.pick(["present", "past"])
        first, second = self.action(kind=kind), self.action(kind=kind, timed=False)
        if first.subject.en == second.subject.en:
            raise Rejected
        (en1, de1), (en2, de2) = self.main(first), self.main(second)
        return f"{en1}, but {en2}", f"{de1}, aber {de2}", "."

    def purpose(self) -> Sentence:
        subject = self.subject()
        main = self.clause(self.pick(WAYS), subject, plain=True)
        inner = self.clause(self.pick(PURPOSES), subject, "present", plain=True, timed=False)
        en, de = self.main(main, front=1)
        return f"{en} in order to {english(inner, 'infinitive')}", f"{de}, um {german(inner, 'infinitive')}", "."


Sentence = tuple[str, str, str]
Template = Callable[[Grammar], Sentence]

PERSONAL = [verb for verb in VERBS if "person" in verb.subjects]
BEARERS = [verb for verb in VERBS if verb.frame in (ACC, DAT) and "onto!" not in verb.extras]
RELATABLE = [verb for verb in VERBS if verb.frame in (ACC, "dat+acc")]
RELATABLE_PERSONAL = [verb for verb in PERSONAL if verb in RELATABLE]
THINGS = ("thing", "clothing", "furniture", "machine")
BEINGS = ("person", "animal")
DESCRIBED = (*THINGS, "person", "animal", "food", "drink", "text", "event", "opening", "place")
SCENES = [("furniture", "room"), ("item", "room"), ("animal", "outdoor"), ("person", "building"), ("food", "room")]
OPINION_VERBS = ("buy", "sell", "need", "order", "repair", "throw ~away", "read", "translate")
REASONS = [("because", "weil"), ("although", "obwohl")]
WAYS = [verb for verb in VERBS if verb.key in ("walk", "travel", "fly", "get up", "come back", "stay", "come")]
ASKABLE = [v for v in PERSONAL if v.frame == ACC and v.rest == v.particle == "" and not {*v.objects} & {*BEINGS}]
PURPOSES = [v for v in PERSONAL if "modal" in v.extras and (v.frame != "-" or v.key in ("work", "dance", "sleep"))]

TEMPLATES: dict[Template, float] = {
    Grammar.statement: 16,
    Grammar.question: 5,
    Grammar.wh_question: 4,
    Grammar.request: 3,
    Grammar.description: 4,
    Grammar.contrast: 3,
    Grammar.cost: 5,
    Grammar.existence: 4,
    Grammar.reported: 11,
    Grammar.reason: 10,
    Grammar.condition: 9,
    Grammar.opinion: 5,
    Grammar.related: 12,
    Grammar.sequence: 6,
    Grammar.opposition: 7,
    Grammar.purpose: 6,
}
SUBORDINATE: dict[Template, float] = {Grammar.reported: 2, Grammar.reason: 2, Grammar.condition: 2}
# Where only some sentences can show a class, try no others.
FOCUSED: dict[str, dict[Template, float]] = {
    "pronoun": {Grammar.contrast: 1, Grammar.opinion: 2},
    "separable verb": SUBORDINATE | {Grammar.related: 1},
    "relative clause": SUBORDINATE,
}


def words(text: str) -> list[str]:
    """The words made of letters; numbers are free to be new."""
    return re.findall(r"[^\W\d_]+(?:['-][^\W\d_]+)*", text)


def generate() -> dict[str, list[Pair]]:
    """All splits. No sentence, English or German, occurs twice in all of them together."""
    grammar = Grammar(SEED)
    seen: set[str] = set()

    def fresh(known: set[str] | None = None, new_forms: bool = False) -> Pair:
        while True:
            en, de = grammar.pair()
            if en in seen or de in seen or not 5 <= len(en.split()) <= 24:
                continue
            if known is not None and not known.issuperset(words(en) + ([] if new_forms else words(de))):
                continue
            seen.update((en, de))
            return en, de

    splits = {split: [fresh() for _ in range(size)] for split, size in SIZES.items()}
    known = {word for pair in splits["train"] for side in pair for word in words(side)}
    splits["test_compositional"] = []
    for grammar.focus in CLASSES:
        splits["test_compositional"] += [fresh(known, grammar.focus in NEW_FORMS) for _ in range(PER_CLASS)]
    return splits


def main(arguments: list[str]) -> None:
    out = Path(arguments[0]) if arguments else Path(__file__).resolve().parents[1] / "data" / "demo"
    out.mkdir(parents=True, exist_ok=True)
    splits = generate()
    for split, pairs in splits.items():
        for side, language in enumerate(("en", "de")):
            text = "".join(pair[side] + "\n" for pair in pairs)
            (out / f"{split}.{language}").write_text(text, encoding="utf-8", newline="\n")
    counts = ", ".join(f"{split} {len(pairs)}" for split, pairs in splits.items())
    sys.stdout.write(f"{out}: {counts} sentence pairs\n")


if __name__ == "__main__":
    main(sys.argv[1:])
