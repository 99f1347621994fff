"""Language codes: which language an ISO 639 code names, in any part of the standard.

The table has the languages with a two-letter code, since that is what sacreBLEU and Moses call them by; any other
three letters are taken for a code of ISO 639-3, which has eight thousand.
"""

import re

from transformer.errors import InputError

# Each language that has both: its two letters (ISO 639-1), and its three (639-2/T and 639-3).
_BOTH = """
    aa:aar ab:abk ae:ave af:afr ak:aka am:amh an:arg ar:ara as:asm av:ava ay:aym az:aze ba:bak be:bel bg:bul bi:bis
    bm:bam bn:ben bo:bod br:bre bs:bos ca:cat ce:che ch:cha co:cos cr:cre cs:ces cu:chu cv:chv cy:cym da:dan de:deu
    dv:div dz:dzo ee:ewe el:ell en:eng eo:epo es:spa et:est eu:eus fa:fas ff:ful fi:fin fj:fij fo:fao fr:fra fy:fry
    ga:gle gd:gla gl:glg gn:grn gu:guj gv:glv ha:hau he:heb hi:hin ho:hmo hr:hrv ht:hat hu:hun hy:hye hz:her ia:ina
    id:ind ie:ile ig:ibo ii:iii ik:ipk io:ido is:isl it:ita iu:iku ja:jpn jv:jav ka:kat kg:kon ki:kik kj:kua kk:kaz
    kl:kal km:khm kn:kan ko:kor kr:kau ks:kas ku:kur kv:kom kw:cor ky:kir la:lat lb:ltz lg:lug li:lim ln:lin lo:lao
    lt:lit lu:lub lv:lav mg:mlg mh:mah mi:mri mk:mkd ml:mal mn:mon mr:mar ms:msa mt:mlt my:mya na:nau nb:nob nd:nde
    ne:nep ng:ndo nl:nld nn:nno no:nor nr:nbl nv:nav ny:nya oc:oci oj:oji om:orm or:ori os:oss pa:pan pi:pli pl:pol
    ps:pus pt:por qu:que rm:roh rn:run ro:ron ru:rus rw:kin sa:san sc:srd sd:snd se:sme sg:sag sh:hbs si:sin sk:slk
    sl:slv sm:smo sn:sna so:som sq:sqi sr:srp ss:ssw st:sot su:sun sv:swe sw:swa ta:tam te:tel tg:tgk th:tha ti:tir
    tk:tuk tl:tgl tn:tsn to:ton tr:tur ts:tso tt:tat tw:twi ty:tah ug:uig uk:ukr ur:urd uz:uzb ve:ven vi:vie vo:vol
    wa:wln wo:wol xh:xho yi:yid yo:yor za:zha zh:zho zu:zul
"""

# Further three-letter codes of the same languages: those of ISO 639-2/B, and the members of Chinese.
_OTHERS = """
    bo:tib cs:cze cy:wel de:ger el:gre eu:baq fa:per fr:fre hy:arm is:ice ka:geo mi:mao mk:mac ms:may my:bur nl:dut
    ro:rum sk:slo sq:alb zh:chi
    zh:cdo zh:cjy zh:cmn zh:cnp zh:cpx zh:csp zh:czh zh:czo zh:gan zh:hak zh:hsn zh:lzh zh:mnp zh:nan zh:wuu zh:yue
"""

# English names, for people.
_NAMES = """
    aa:Afar, ab:Abkhazian, ae:Avestan, af:Afrikaans, ak:Akan, am:Amharic, an:Aragonese, ar:Arabic, as:Assamese,
    av:Avaric, ay:Aymara, az:Azerbaijani, ba:Bashkir, be:Belarusian, bg:Bulgarian, bi:Bislama, bm:Bambara,
    bn:Bengali, bo:Tibetan, br:Breton, bs:Bosnian, ca:Catalan, ce:Chechen, ch:Chamorro, co:Corsican, cr:Cree,
    cs:Czech, cu:Church Slavic, cv:Chuvash, cy:Welsh, da:Danish, de:German, dv:Dhivehi, dz:Dzongkha, ee:Ewe,
    el:Greek, en:English, eo:Esperanto, es:Spanish, et:Estonian, eu:Basque, fa:Persian, ff:Fulah, fi:Finnish,
    fj:Fijian, fo:Faroese, fr:French, fy:Western Frisian, ga:Irish, gd:Scottish Gaelic, gl:Galician, gn:Guarani,
    gu:Gujarati, gv:Manx, ha:Hausa, he:Hebrew, hi:Hindi, ho:Hiri Motu, hr:Croatian, ht:Haitian, hu:Hungarian,
    hy:Armenian, hz:Herero, ia:Interlingua, id:Indonesian, ie:Interlingue, ig:Igbo, ii:Sichuan Yi, ik:Inupiaq,
    io:Ido, is:Icelandic, it:Italian, iu:Inuktitut, ja:Japanese, jv:Javanese, ka:Georgian, kg:Kongo, ki:Kikuyu,
    kj:Kuanyama, kk:Kazakh, kl:Greenlandic, km:Khmer, kn:Kannada, ko:Korean, kr:Kanuri, ks:Kashmiri, ku:Kurdish,
    kv:Komi, kw:Cornish, ky:Kyrgyz, la:Latin, lb:Luxembourgish, lg:Ganda, li:Limburgan, ln:Lingala, lo:Lao,
    lt:Lithuanian, lu:Luba-Katanga, lv:Latvian, mg:Malagasy, mh:Marshallese, mi:Maori, mk:Macedonian, ml:Malayalam,
    mn:Mongolian, mr:Marathi, ms:Malay, mt:Maltese, my:Burmese, na:Nauru, nb:Norwegian Bokmål, nd:North Ndebele,
    ne:Nepali, ng:Ndonga, nl:Dutch, nn:Norwegian Nynorsk, no:Norwegian, nr:South Ndebele, nv:Navajo, ny:Nyanja,
    oc:Occitan, oj:Ojibwa, om:Oromo, or:Odia, os:Ossetian, pa:Punjabi, pi:Pali, pl:Polish, ps:Pashto, pt:Portuguese,
    qu:Quechua, rm:Romansh, rn:Rundi, ro:Romanian, ru:Russian, rw:Kinyarwanda, sa:Sanskrit, sc:Sardinian, sd:Sindhi,
    se:Northern Sami, sg:Sango, sh:Serbo-Croatian, si:Sinhala, sk:Slovak, sl:Slovenian, sm:Samoan, sn:Shona,
    so:Somali, sq:Albanian, sr:Serbian, ss:Swati, st:Southern Sotho, su:Sundanese, sv:Swedish, sw:Swahili, ta:Tamil,
    te:Telugu, tg:Tajik, th:Thai, ti:Tigrinya, tk:Turkmen, tl:Tagalog, tn:Tswana, to:Tongan, tr:Turkish, ts:Tsonga,
    tt:Tatar, tw:Twi, ty:Tahitian, ug:Uyghur, uk:Ukrainian, ur:Urdu, uz:Uzbek, ve:Venda, vi:Vietnamese, vo:Volapük,
    wa:Walloon, wo:Wolof, xh:Xhosa, yi:Yiddish, yo:Yoruba, za:Zhuang, zh:Chinese, zu:Zulu
"""

_TWO_LETTERS = {pair.partition(":")[0] for pair in _BOTH.split()}
_SHORT = {three: two for two, _, three in (pair.partition(":") for pair in (_BOTH + _OTHERS).split())}

_NAME = dict(entry.split(":") for entry in " ".join(_NAMES.split()).split(", "))

# What is typed for a code: names, countries, and codes of old.
_MEANT = {name.lower(): code for code, name in _NAME.items()}
_MEANT |= {"cn": "zh", "cz": "cs", "dk": "da", "gr": "el", "jp": "ja", "ua": "uk", "vn": "vi", "in": "id", "iw": "he"}

# Written without spaces between words.
UNSPACED = frozenset({"bo", "dz", "ja", "km", "lo", "my", "th", "zh"})


def name_of(language: str) -> str:
    """The English name of a language, by what `language_of` gives; the code itself where it has three letters."""
    return _NAME.get(language, language)


def language_of(code: str, key: str) -> str:
    """The language's two-letter code where there is one, else its three letters: `deu`, `ger` and `de_AT` are `de`.

    Region and script do not count. Raises InputError, with the `key` that was set to it, for what is not a code.
    """
    match = re.fullmatch(r"([a-z]{2,3})([-_][a-z0-9]{1,8})*", code.lower())
    primary = match[1] if match else ""
    language = _SHORT.get(primary, primary)
    if len(language) == 3 or language in _TWO_LETTERS:
        return language
    meant = _MEANT.get(code.lower()) or _MEANT.get(primary)
    hint = f"; did you mean {meant}?" if meant else ":"
    raise InputError(
        f"{key}={code}: not a code of ISO 639{hint} give two or three letters, such as de, zh, ja or deu, zho, jpn "
        "(a region or script may follow: zh-Hant)"
    )
