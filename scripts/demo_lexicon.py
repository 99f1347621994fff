"""Lexicon of the demo corpus: nouns, verbs, adjectives and small words of English and German, as tables.

Every line of a table is one entry, its columns are separated by "|". The tags tie the words together: an adjective
lists the tags of the nouns it may modify, a verb those of its subjects and objects, so that nobody reads an apple.
German forms that cannot be derived safely (plurals, present tense, participles) are written out; doubling the lexicon
means adding lines. English and German entries pair one to one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

Pair = tuple[str, str]
NOM, ACC, DAT, GEN = "nom", "acc", "dat", "gen"


def paradigm(*rows: str) -> dict[str, dict[str, str]]:
    """Four rows (masculine, feminine, neuter, plural) of four endings or forms; "-" is the empty one."""
    cells = [["" if cell == "-" else cell for cell in row.split()] for row in rows]
    cases = (NOM, ACC, DAT, GEN)
    return {gender: dict(zip(cases, row, strict=True)) for gender, row in zip("mfnp", cells, strict=True)}


DER = paradigm("der den dem des", "die die der der", "das das dem des", "die die den der")
DIES = paradigm("er en em es", "e e er er", "es es em es", "e e en er")  # dieser, jeder, viele
EIN = paradigm("- en em es", "e e er er", "- - em es", "e e en er")  # ein, kein, mein
WEAK = paradigm("e en en en", "e e en en", "e e en en", "en en en en")  # after der, dieser
MIXED = paradigm("er en en en", "e e en en", "es es en en", "en en en en")  # after ein, kein, mein
STRONG = paradigm("er en em en", "e e er er", "es es em en", "e e en er")  # after no article, a number, viele
RELATIVE = {gender: forms | ({DAT: "denen"} if gender == "p" else {}) for gender, forms in DER.items()}
DECLENSION = {"der": WEAK, "dies": WEAK, "viel": STRONG, "ein": MIXED, "none": STRONG}

CONTRACTIONS = {"in dem": "im", "in das": "ins", "an dem": "am", "an das": "ans", "zu dem": "zum", "zu der": "zur"}
CONTRACTIONS |= {"von dem": "vom", "bei dem": "beim"}


def rows(table: str) -> Iterator[list[str]]:
    for line in table.strip().splitlines():
        yield [cell.strip() for cell in line.split("|")]


def listed(text: str) -> list[str]:
    return [item.strip() for item in text.split(",")]


@dataclass(frozen=True, slots=True, eq=False)
class Noun:
    en: str
    en_plural: str
    gender: str
    de: str
    de_plural: str
    weak: bool
    mass: bool
    tags: frozenset[str]

    def english(self, plural: bool) -> str:
        return self.en_plural if plural else self.en

    def german(self, plural: bool, case: str) -> str:
        if plural:
            return self.de_plural + ("n" if case == DAT and self.de_plural[-1] not in "ns" else "")
        if self.weak and case != NOM:
            return self.de_plural
        return self.de + (genitive_ending(self.de) if case == GEN and self.gender != "f" else "")


@dataclass(frozen=True, slots=True, eq=False)
class Adjective:
    en: str
    de: str
    stem: str
    tags: frozenset[str]
    clash: frozenset[str]  # adjectives it does not go with, itself included


@dataclass(frozen=True, slots=True, eq=False)
class Verb:
    en: str
    en_past: str
    particle: str  # "on" of "turn it on", which a pronoun precedes
    rest: str  # "for" of "look for", "asleep" of "fall asleep"
    prefix: str
    infinitive: str  # without the prefix
    third: str
    participle: str
    sein: bool
    frame: str = "-"
    subjects: tuple[str, ...] = ()
    objects: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    preterite: str = ""  # of sein and haben, which use it for the past
    key: str = ""

    def present(self, agreement: str) -> str:
        if agreement == "3s" or (agreement == "1s" and self.third == "weiß"):
            return self.third
        if agreement == "pl":
            return self.infinitive
        return re.sub("e?n$", "", self.infinitive) + "e"

    @property
    def zu_infinitive(self) -> str:
        return f"{self.prefix}zu{self.infinitive}" if self.prefix else f"zu {self.infinitive}"


@dataclass(frozen=True, slots=True, eq=False)
class Modal:
    en: str
    en_past: str  # equal to en for auxiliaries
    auxiliary: bool
    de: dict[str, str]
    kind: str
    negatable: bool


def genitive_ending(word: str) -> str:
    one_syllable = len(re.findall("[aeiouyäöü]+", word.lower())) == 1
    return "es" if one_syllable or re.search("(s|ß|x|z|sch|st)$", word) else "s"


def english_s(word: str) -> str:
    """The plural of a noun, the third person of a verb."""
    if word in ("have", "be"):
        return {"have": "has", "be": "is"}[word]
    if re.search("(s|x|z|ch|sh|go)$", word):
        return word + "es"
    return word[:-1] + "ies" if re.search("[^aeiou]y$", word) else word + "s"


def english_past(word: str) -> str:
    if re.search("[^aeiou]y$", word):
        return word[:-1] + "ied"
    return word + ("d" if word.endswith("e") else "ed")


def article(following: str) -> str:
    return "an" if following[0] in "aeiou" else "a"


def determiner(stem: str, kind: str, gender: str, case: str) -> str:
    """A German article word; gender "p" is the plural."""
    if kind == "der":
        return DER[gender][case]
    if kind == "none":
        return stem
    return stem + (EIN if kind == "ein" else DIES)[gender][case]


def contract(preposition: str, phrase: str) -> str:
    first, _, rest = phrase.partition(" ")
    head = f"{preposition} {first}"
    return f"{CONTRACTIONS.get(head, head)} {rest}".rstrip()


def number(value: int) -> Pair:
    if value < len(NUMBERS):
        return NUMBERS[value]
    grouped = f"{value:,}"
    return grouped, grouped.replace(",", ".")


def price(cents: int) -> Pair:
    euros, rest = divmod(cents, 100)
    en, de = f"{euros:,}", f"{euros:,}".replace(",", ".")
    return (f"{en}.{rest:02} euros", f"{de},{rest:02} Euro") if rest else (f"{en} euros", f"{de} Euro")


def parse_noun(en: str, de: str, tags: str) -> Noun:
    singular, _, plural = en.partition("/")
    gender, forms = de.split(" ", 1)
    de_singular, _, de_plural = forms.rstrip("*").partition("/")
    return Noun(
        en=singular,
        en_plural=plural or english_s(singular),
        gender={"der": "m", "die": "f", "das": "n"}[gender],
        de=de_singular,
        de_plural=de_plural,
        weak=forms.endswith("*"),
        mass=plural == "-",
        tags=frozenset(tags.split()),
    )


def parse_verb(
    en: str, de: str, frame: str = "-", objects: str = "", extras: str = "", subjects: str = "person"
) -> Verb:
    head, _, rest = en.partition(" ")
    base, _, past = head.partition("/")
    infinitive, third, participle, *mark = de.split()
    prefix, _, finite = infinitive.rpartition("+")
    return Verb(
        en=base,
        en_past=past or english_past(base),
        particle=rest[1:] if rest.startswith("~") else "",
        rest="" if rest.startswith("~") else rest,
        prefix=prefix,
        infinitive=finite,
        third=third,
        participle=participle,
        sein=mark == ["ist"],
        frame=frame,
        subjects=tuple(subjects.split()),
        objects=tuple(objects.split()),
        extras=tuple(extras.split()),
        preterite=participle if mark == ["preterite"] else "",
        key=f"{base} {rest}".strip(),
    )


def parse_modal(en: str, de: str, kind: str, negatable: str) -> Modal:
    singular, plural = de.split()
    third, _, first = singular.partition("/")
    words, _, past = en.partition("/")
    forms = {"3s": third, "1s": first or third, "pl": plural}
    return Modal(words, past or words, " " not in words, forms, kind, negatable == "yes")


def parse_adjective(en: str, de: str, tags: str) -> Adjective:
    form, _, stem = de.partition("/")
    clash = [en, *(word for scale in SCALES.splitlines() if en in scale.split() for word in scale.split())]
    return Adjective(en, form, stem or form, frozenset(tags.split()), frozenset(clash))


# English singular[/plural] | German article, singular/plural ("*": weak, all forms but the nominative end in -n) | tags
NOUN_TABLE = """
teacher         | der Lehrer/Lehrer                      | person adult
doctor          | der Arzt/Ärzte                         | person adult
student         | der Student/Studenten*                 | person adult
boy             | der Junge/Jungen*                      | person unowned young
neighbour       | der Nachbar/Nachbarn*                  | person adult
colleague       | der Kollege/Kollegen*                  | person adult
customer        | der Kunde/Kunden*                      | person adult
king            | der König/Könige                       | person unowned adult
cook            | der Koch/Köche                         | person adult
guest           | der Gast/Gäste                         | person adult
man/men         | der Mann/Männer                        | person unowned adult
uncle           | der Onkel/Onkel                        | person kin adult
brother         | der Bruder/Brüder                      | person kin young
son             | der Sohn/Söhne                         | person kin young
woman/women     | die Frau/Frauen                        | person unowned adult
aunt            | die Tante/Tanten                       | person kin adult
sister          | die Schwester/Schwestern               | person kin young
daughter        | die Tochter/Töchter                    | person kin young
queen           | die Königin/Königinnen                 | person unowned adult
nurse           | die Krankenschwester/Krankenschwestern | person adult
actress         | die Schauspielerin/Schauspielerinnen   | person adult
grandmother     | die Großmutter/Großmütter              | person kin adult
girl            | das Mädchen/Mädchen                    | person unowned young
child/children  | das Kind/Kinder                        | person young
dog             | der Hund/Hunde                         | animal
bird            | der Vogel/Vögel                        | animal
bear            | der Bär/Bären*                         | animal
cat             | die Katze/Katzen                       | animal
cow             | die Kuh/Kühe                           | animal
duck            | die Ente/Enten                         | animal
mouse/mice      | die Maus/Mäuse                         | animal
horse           | das Pferd/Pferde                       | animal
apple           | der Apfel/Äpfel                        | food sweet ware
cake            | der Kuchen/Kuchen                      | food sweet ware meal
biscuit         | der Keks/Kekse                         | food sweet ware
potato/potatoes | die Kartoffel/Kartoffeln               | food ware meal
tomato/tomatoes | die Tomate/Tomaten                     | food ware
banana          | die Banane/Bananen                     | food sweet ware
sausage         | die Wurst/Würste                       | food ware meal
soup            | die Suppe/Suppen                       | food meal
pizza           | die Pizza/Pizzas                       | food meal
egg             | das Ei/Eier                            | food ware
cheese/-        | der Käse/-                             | mass food
bread/-         | das Brot/-                             | mass food
meat/-          | das Fleisch/-                          | mass food
coffee/-        | der Kaffee/-                           | mass boiled drink
juice/-         | der Saft/-                             | mass drink
milk/-          | die Milch/-                            | mass boiled drink
water/-         | das Wasser/-                           | mass boiled drink
book            | das Buch/Bücher                        | thing text ware item portable
newspaper       | die Zeitung/Zeitungen                  | thing text ware item portable
letter          | der Brief/Briefe                       | thing text written item portable
novel           | der Roman/Romane                       | thing text written ware item portable
poem            | das Gedicht/Gedichte                   | text written
report          | der Bericht/Berichte                   | text written serious
email           | die E-Mail/E-Mails                     | text written serious
key             | der Schlüssel/Schlüssel                | thing item portable
umbrella        | der Regenschirm/Regenschirme           | thing item ware coloured portable
ball            | der Ball/Bälle                         | thing item ware coloured
computer        | der Computer/Computer                  | thing ware device item
plate           | der Teller/Teller                      | thing item ware holder washable
bag             | die Tasche/Taschen                     | thing item ware coloured holder lid
bottle          | die Flasche/Flaschen                   | thing item holder lid portable
lamp            | die Lampe/Lampen                       | thing item ware coloured device
clock           | die Uhr/Uhren                          | thing item ware portable machine
camera          | die Kamera/Kameras                     | thing item ware device portable
flower          | die Blume/Blumen                       | thing item ware coloured
box             | die Kiste/Kisten                       | thing item holder lid coloured
knife/knives    | das Messer/Messer                      | thing item ware portable
picture         | das Bild/Bilder                        | thing item ware
radio           | das Radio/Radios                       | thing item ware device
gift            | das Geschenk/Geschenke                 | thing item portable
coat            | der Mantel/Mäntel                      | clothing item ware coloured washable
hat             | der Hut/Hüte                           | thing item ware coloured
jacket          | die Jacke/Jacken                       | clothing item ware coloured washable
shirt           | das Hemd/Hemden                        | clothing item ware coloured washable
dress           | das Kleid/Kleider                      | clothing item ware coloured washable
table           | der Tisch/Tische                       | furniture ware coloured surface
chair           | der Stuhl/Stühle                       | furniture ware coloured surface
cupboard        | der Schrank/Schränke                   | furniture ware coloured holder lid
sofa            | das Sofa/Sofas                         | furniture ware coloured surface
bed             | das Bett/Betten                        | furniture ware surface
train           | der Zug/Züge                           | vehicle road line
bus/buses       | der Bus/Busse                          | vehicle road line coloured machine
car             | das Auto/Autos                         | vehicle road coloured machine washable
ship            | das Schiff/Schiffe                     | vehicle line machine
bicycle         | das Fahrrad/Fahrräder                  | thing coloured machine washable
garden          | der Garten/Gärten                      | place outdoor
park            | der Park/Parks                         | place outdoor sight
forest          | der Wald/Wälder                        | place outdoor
cellar          | der Keller/Keller                      | place room
kitchen         | die Küche/Küchen                       | place room
school          | die Schule/Schulen                     | place building
city/cities     | die Stadt/Städte                       | place sight
church          | die Kirche/Kirchen                     | place building sight
library         | die Bibliothek/Bibliotheken            | place building
house           | das Haus/Häuser                        | place building
room            | das Zimmer/Zimmer                      | place room
office          | das Büro/Büros                         | place room
museum          | das Museum/Museen                      | place building sight
hotel           | das Hotel/Hotels                       | place building
village         | das Dorf/Dörfer                        | place sight
castle          | das Schloss/Schlösser                  | place building sight
restaurant      | das Restaurant/Restaurants             | place building
door            | die Tür/Türen                          | opening coloured
window          | das Fenster/Fenster                    | opening
film            | der Film/Filme                         | event
party           | die Feier/Feiern                       | event
meeting         | die Sitzung/Sitzungen                  | event serious
exam            | die Prüfung/Prüfungen                  | event serious
concert         | das Konzert/Konzerte                   | event
"""

# English | German (with the stem before an ending, where it differs) | tags of the nouns it modifies
# "mood" marks what people may be for a while; "colour" and "size" may stand together, the size first.
ADJECTIVE_TABLE = """
old         | alt          | adult animal thing clothing furniture vehicle machine place opening
young       | jung         | adult animal
new         | neu          | thing clothing furniture vehicle machine opening room building text
big         | groß         | animal thing furniture vehicle place opening ware size
small       | klein        | animal thing furniture vehicle place opening ware size
red         | rot          | coloured colour
blue        | blau         | coloured colour
green       | grün         | coloured colour
white       | weiß         | coloured colour
black       | schwarz      | coloured colour
expensive   | teuer/teur   | thing clothing furniture machine ware
cheap       | billig       | thing clothing furniture machine ware
beautiful   | schön        | thing clothing furniture place
ugly        | hässlich     | clothing furniture building
heavy       | schwer       | furniture holder device
broken      | kaputt       | device machine furniture opening
empty       | leer         | holder room
clean       | sauber       | clothing room washable
dirty       | schmutzig    | clothing room washable
friendly    | freundlich   | person
polite      | höflich      | person
strict      | streng       | adult
clever      | klug         | person animal
nice        | nett         | person
brave       | mutig        | person animal
strong      | stark        | adult animal
rich        | reich        | adult
famous      | berühmt      | adult sight
lazy        | faul         | person animal
tired       | müde/müd     | person animal mood
ill         | krank        | person animal mood
happy       | glücklich    | person mood
sad         | traurig      | person mood
angry       | wütend       | person mood
hungry      | hungrig      | person animal mood
fresh       | frisch       | food
delicious   | lecker       | food
sweet       | süß          | sweet
cold        | kalt         | drink meal
hot         | heiß         | boiled meal
interesting | interessant  | text event
boring      | langweilig   | text event
long        | lang         | text event
short       | kurz         | text event
important   | wichtig      | serious
dark        | dunkel/dunkl | room building outdoor
quiet       | ruhig        | place
modern      | modern       | building room device
"""

# English infinitive[/past] ("~": a particle, "turn it on") | German: infinitive ("+" after a separable prefix),
# third person singular, participle ("ist": perfect with sein) | object: case, or preposition and case | object tags
# | adjuncts it takes ("!": must), "modal": goes with modal verbs, "year": may be dated by the year, "state": no future
# | subject tags, if not just "person"
VERB_TABLE = """
buy/bought         | kaufen kauft gekauft               | acc      | ware drink        | for modal year
sell/sold          | verkaufen verkauft verkauft        | acc      | ware machine      | modal year
need               | brauchen braucht gebraucht         | acc      | item furniture    |
order              | bestellen bestellt bestellt        | acc      | meal ware drink   | for modal
eat/ate            | essen isst gegessen                | acc      | food              | in with modal | person animal
drink/drank        | trinken trinkt getrunken           | acc      | drink             | in with modal
read/read          | lesen liest gelesen                | acc      | text              | in modal
write/wrote        | schreiben schreibt geschrieben     | acc      | written           | in for modal
translate          | übersetzen übersetzt übersetzt     | acc      | text              | for modal year
see/saw            | sehen sieht gesehen                | acc      | person animal     | in modal year | person animal
visit              | besuchen besucht besucht           | acc      | person sight      | with modal year
meet/met           | treffen trifft getroffen           | acc      | person            | in modal year
look for           | suchen sucht gesucht               | acc      | item animal       | in modal
find/found         | finden findet gefunden             | acc      | item animal       | in modal
lose/lost          | verlieren verliert verloren        | acc      | portable item     | in year
forget/forgot      | vergessen vergisst vergessen       | acc      | portable clothing |
wash               | waschen wäscht gewaschen           | acc      | washable          | modal
carry              | tragen trägt getragen              | acc      | thing furniture    | into modal
paint              | malen malt gemalt                  | acc      | animal sight      | for modal year
repair             | reparieren repariert repariert     | acc      | device machine    | for modal
photograph         | fotografieren fotografiert fotografiert | acc | person animal sight | modal year
open               | öffnen öffnet geöffnet             | acc      | opening lid       | modal
feed/fed           | füttern füttert gefüttert          | acc      | animal            | in modal
close              | zu+machen macht zugemacht          | acc      | opening lid       | modal
call               | an+rufen ruft angerufen            | acc      | person            | modal
invite             | ein+laden lädt eingeladen          | acc      | person            | modal year
pick ~up           | ab+holen holt abgeholt             | acc      | person            | with modal
turn ~on           | ein+schalten schaltet eingeschaltet | acc     | device            | modal
turn ~off          | aus+schalten schaltet ausgeschaltet | acc     | device            | modal
put/put ~on        | an+ziehen zieht angezogen          | acc      | clothing          | modal
bring/brought ~back | zurück+bringen bringt zurückgebracht | acc   | item clothing     | modal
tidy ~up           | auf+räumen räumt aufgeräumt        | acc      | room              | with modal
throw/threw ~away  | weg+werfen wirft weggeworfen       | acc      | thing clothing    | modal
help               | helfen hilft geholfen              | dat      | person            | in modal
thank              | danken dankt gedankt               | dat      | person            | modal
answer             | antworten antwortet geantwortet    | dat      | person            | modal
follow             | folgen folgt gefolgt ist           | dat      | person animal     | into modal | person animal
congratulate       | gratulieren gratuliert gratuliert  | dat      | person            | modal
listen to          | zu+hören hört zugehört             | dat      | person            | modal
belong to          | gehören gehört gehört              | dat      | person            | state | thing machine
give/gave          | geben gibt gegeben                 | dat+acc  | item meal         | modal
show               | zeigen zeigt gezeigt               | dat+acc  | item sight room   | modal
send/sent          | schicken schickt geschickt         | dat+acc  | written portable  | modal year
lend/lent          | leihen leiht geliehen              | dat+acc  | item clothing     | modal year
wait for           | warten wartet gewartet             | auf+acc  | person line       | in with modal
think/thought of   | denken denkt gedacht               | an+acc   | person event      | modal
dream of           | träumen träumt geträumt            | von+dat  | vehicle sight     |
talk about         | sprechen spricht gesprochen        | über+acc | event text        | with modal
put/put            | legen legt gelegt                  | acc      | portable clothing | onto! modal
work               | arbeiten arbeitet gearbeitet       | -        |                   | in with modal year
sleep/slept        | schlafen schläft geschlafen        | -        |                   | in during modal | person animal
play               | spielen spielt gespielt            | -        |                   | in with modal | young animal
dance              | tanzen tanzt getanzt               | -        |                   | in with modal
laugh              | lachen lacht gelacht               | -        |                   | during with modal
stay               | bleiben bleibt geblieben ist       | -        |                   | in! modal
sit/sat            | sitzen sitzt gesessen              | -        |                   | spot! modal | person animal
lie/lay            | liegen liegt gelegen               | -        |                   | spot! state | portable clothing
walk               | gehen geht gegangen ist            | -        |                   | into! with modal
run/ran            | laufen läuft gelaufen ist          | -        |                   | into! modal | young animal
come/came          | kommen kommt gekommen ist          | -        |                   | from! modal
travel/travelled   | fahren fährt gefahren ist          | -        |                   | ride! modal year
fly/flew           | fliegen fliegt geflogen ist        | -        |                   | fly! with modal year
get/got up         | auf+stehen steht aufgestanden ist  | -        |                   | modal
fall/fell asleep   | ein+schlafen schläft eingeschlafen ist | -    |                   | during | person animal
arrive             | an+kommen kommt angekommen ist     | -        |                   | town | person line
come/came back     | zurück+kommen kommt zurückgekommen ist | -    |                   | modal
"""

# English | German preposition and case | tags of the nouns. The two-way prepositions appear with both cases.
PREPOSITION_TABLE = """
in      | in dat      | place
into    | in acc      | place
from    | aus dat     | place
on      | auf dat     | surface
onto    | auf acc     | surface
under   | unter dat   | furniture
at      | an dat      | opening
behind  | hinter dat  | building
next to | neben dat   | furniture building
with    | mit dat     | person
for     | für acc     | person
during  | während gen | event
"""

# English, as an auxiliary ("can") or with an infinitive ("want to"; past after the slash) | German singular[/first
# person singular], plural | kind of time expressions | may be negated ("must not" is "darf nicht", so it is left out)
MODAL_TABLE = """
will              | wird/werde werden | future | yes
can               | kann können       | future | yes
must              | muss müssen       | future | no
should            | sollte sollten    | future | yes
may               | darf dürfen       | future | no
want to           | will wollen       | future | yes
could             | konnte konnten    | past   | yes
have to/had to    | musste mussten    | past   | no
want to/wanted to | wollte wollten    | past   | yes
"""

# Verbs that govern a clause: English[/past] | German infinitive, third person singular, participle | conjunctions
SPEECH_TABLE = """
say/said      | sagen sagt gesagt       | that
believe       | glauben glaubt geglaubt | that
hope          | hoffen hofft gehofft    | that
know/knew     | wissen weiß gewusst     | that whether when why
hear/heard    | hören hört gehört       | that
ask           | fragen fragt gefragt    | whether when why
"""

CONJUNCTIONS = {"that": "dass", "whether": "ob", "when": "wann", "why": "warum"}

# Adjectives that contradict or double each other on one noun
SCALES = """
old young new modern
big small
red blue green white black
expensive cheap
beautiful ugly
clean dirty
new broken
empty heavy
happy sad angry
interesting boring
long short
hot cold
fresh delicious
"""

# What speaks for a thing and what against it
MERITS = listed("new, beautiful, cheap, clean, modern, interesting, important, fresh, delicious, sweet")
FLAWS = listed("old, expensive, ugly, dirty, broken, boring, heavy, empty")

NAMES = {"Anna": "she", "Maria": "she", "Julia": "she", "Eva": "she"} | dict.fromkeys(("Peter", "Paul", "Martin"), "he")

CITIES = {"Berlin": "Berlin", "Munich": "München", "Cologne": "Köln", "Vienna": "Wien", "Hamburg": "Hamburg"}

# English subject, object, possessive | German nominative, accusative, dative, possessive stem | agreement
PRONOUN_TABLE = """
I    me   my    | ich mich mir mein | 1s
he   him  his   | er ihn ihm sein   | 3s
she  her  her   | sie sie ihr ihr   | 3s
we   us   our   | wir uns uns unser | pl
they them their | sie sie ihnen ihr | pl
you  you  your  | Sie Sie Ihnen Ihr | pl
"""

# Time expressions: English | German | kinds (tenses) they go with; "yearly" ones need a verb that may be dated so
TIME_TABLE = """
today         | heute           | present future
now           | jetzt           | present future
every day     | jeden Tag       | present
every morning | jeden Morgen    | present
every evening | jeden Abend     | present
every week    | jede Woche      | present
yesterday     | gestern         | past
this morning  | heute Morgen    | past
last night    | gestern Abend   | past
last week     | letzte Woche    | yearly-past
last year     | letztes Jahr    | yearly-past
last summer   | letzten Sommer  | yearly-past
tomorrow      | morgen          | future
tonight       | heute Abend     | future
soon          | bald            | future
next week     | nächste Woche   | yearly-future
next year     | nächstes Jahr   | yearly-future
next summer   | nächsten Sommer | yearly-future
"""

NUMBER_LIST = """zero null, one eins, two zwei, three drei, four vier, five fünf, six sechs, seven sieben, eight acht,
nine neun, ten zehn, eleven elf, twelve zwölf"""

WEEKDAY_LIST = """Monday Montag, Tuesday Dienstag, Wednesday Mittwoch, Thursday Donnerstag, Friday Freitag,
Saturday Samstag, Sunday Sonntag"""

# English month, German month, days
MONTH_LIST = """January Januar 31, February Februar 28, March März 31, April April 30, May Mai 31, June Juni 30,
July Juli 31, August August 31, September September 30, October Oktober 31, November November 30,
December Dezember 31"""

# Subordinate clauses about the weather: English present, past | German (verb last) present, past
WEATHER_TABLE = """
it is raining       | it was raining       | es regnet               | es geregnet hat
it is snowing       | it was snowing       | es schneit              | es geschneit hat
the sun is shining  | the sun was shining  | die Sonne scheint       | die Sonne geschienen hat
the weather is bad  | the weather was bad  | das Wetter schlecht ist | das Wetter schlecht war
the weather is good | the weather was good | das Wetter gut ist      | das Wetter gut war
"""

# Held out of training by name, because these classes have few members. Nouns that training never shows in the dative
# plural, nouns no pronoun ("it": er, sie, es) refers to, separable verbs that never stand in a verb-final clause.
NO_DATIVE_PLURAL = frozenset(
    listed("doctor, guest, uncle, child, daughter, man, king, brother, son, table, castle, house")
)
NO_PRONOUN = frozenset(listed("lamp, coat, clock, umbrella, chair, bag, dress, plate, novel, bicycle"))
NO_SUBORDINATE = frozenset(listed("call, turn ~off, pick ~up, tidy ~up, get up, come back, invite"))

# The tables, parsed

NOUNS = [parse_noun(*row) for row in rows(NOUN_TABLE)]
ADJECTIVES = [parse_adjective(*row) for row in rows(ADJECTIVE_TABLE)]
VERBS = [parse_verb(*row) for row in rows(VERB_TABLE)]
BE = parse_verb("be/was", "sein ist war preterite")
BE_FORMS = {"1s": ("am", "was", "bin"), "3s": ("is", "was", "ist"), "pl": ("are", "were", "sind")}
COST = parse_verb("cost/cost", "kosten kostet gekostet")
PAY = parse_verb("pay/paid", "bezahlen bezahlt bezahlt")
SPEECH_VERBS = [(parse_verb(en, de), conjunctions.split()) for en, de, conjunctions in rows(SPEECH_TABLE)]
MODALS = [parse_modal(*row) for row in rows(MODAL_TABLE)]
WILL = MODALS[0]
PREPOSITIONS = {en: (de.split()[0], de.split()[1], tags.split()) for en, de, tags in rows(PREPOSITION_TABLE)}
PRONOUNS = {en.split()[0]: (en.split(), de.split(), agreement) for en, de, agreement in rows(PRONOUN_TABLE)}
TIMES = [(en, de, kinds.split()) for en, de, kinds in rows(TIME_TABLE)]
NUMBERS = [(en, de) for en, de in map(str.split, listed(NUMBER_LIST))]
WEEKDAYS = [(en, de) for en, de in map(str.split, listed(WEEKDAY_LIST))]
MONTHS = [(en, de, int(days)) for en, de, days in map(str.split, listed(MONTH_LIST))]
WEATHER = [(en, en_past, de, de_past) for en, en_past, de, de_past in rows(WEATHER_TABLE)]
