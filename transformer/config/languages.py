"""Language codes: which language a code of ISO 639 names, in whichever part of the standard.

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

_TWO_LETTERS = {pair.partition(":")[0] for pair in _BOTH.split()}
_SHORT = {three: two for two, _, three in (pair.partition(":") for pair in (_BOTH + _OTHERS).split())}


def language_of(code: str, key: str) -> str:
    """The language's two-letter code where there is one, else its three letters: `deu`, `ger` and `de_AT` are `de`.

    Region and script do not count. Raises InputError, with the `key` that was set to it, for what is not a code.
    """
    match = re.fullmatch(r"([a-z]{2,3})([-_][a-z0-9]{1,8})*", code.lower())
    primary = match[1] if match else ""
    language = _SHORT.get(primary, primary)
    if len(language) == 3 or language in _TWO_LETTERS:
        return language
    raise InputError(
        f"{key}={code}: not a code of ISO 639: give two or three letters, such as de, zh, ja or deu, zho, jpn "
        "(a region or script may follow: zh-Hant)"
    )
