"""Has the orders in which the kernels issue their stages; `tools/schedule.py` finds them.

`nki_kernels.schedule` says what an entry means. MADE has the estimates of each order in microseconds, on Trn1
for each of the sizes that its search has.
"""

from delta_trn.nki_kernels.schedule import read_order

MADE = {
    "RULE_FORWARD": (244.64, 270.94, 173.12),
    "RULE_BACKWARD": (515.96, 525.09, 316.20),
    "LAYER_FORWARD": (357.98, 344.11, 214.23),
    "LAYER_BACKWARD": (818.60, 718.27, 474.04),
    "CHANNELS_FORWARD": (277.36, 262.47),
    "CHANNELS_BACKWARD": (648.93, 558.23),
}

RULE_FORWARD = read_order("""
    load even 0; W even 5; merge all 4; R odd 5; P odd 4; sum decays odd 1; merge all 4; S even 5; substitute
    all 3; P T odd 5; D odd 2; transpose q odd 1; O even 5; gates odd 1; D even 1; transpose q even 0; scale k
    odd 3; square keys even 0; substitute all 3; merge all 4; O odd 5; W odd 5; sum decays even 0; scale q odd
    2; scale q even 2; weight D odd 2; L even 2; merge all 4; R even 4; L odd 2; list columns even 2; merge
    all 3; transpose scaled q even 2; merge all 4; S odd 5; merge all 3; scale k even 1; load odd 0; P T even
    4; transpose k odd 1; transpose scaled q odd 2; list columns odd 2; P even 1; scale v even 2; square keys
    odd 0; invert norms even 0; weight D even 1; merge all 3; scale v odd 2; spread columns all 2; merge all
    3; invert norms odd 0; transpose k even 0; gates even 0; substitute all 2
""")

RULE_BACKWARD = read_order("""
    sum crossing pairs even 1; dbeta even 1; load even 0; transpose states even 1; merge odd 1; read states
    even 1; merge odd 1; transpose pairs even 1; merge odd 1; dS odd 2; R odd 1; merge odd 1; square keys even
    0; dP, dL even 1; apply T odd 1; sum decays even 0; invert norms even 0; U odd 1; choose factors even 0;
    shorten keys even 0; multiply terms even 1; transpose pairs even 1; dq, dk even 1; gates even 0; transpose
    keys even 0; R odd 1; sum along keys even 1; sum terms even 1; apply T odd 1; L, P even 0; dq, dk even 1;
    differentiate norms even 1; dR odd 1; store even 1; sum crossing pairs even 1; spread columns even 0; dS
    odd 1; U odd 1; transpose gradients odd 1; substitute even 0; transpose states odd 1; read states odd 1;
    dR odd 1; merge even 0; transpose gradients odd 1; merge even 0; multiply pairs odd 1; multiply terms odd
    1; merge even 0; dg even 10; dg even 1; sum terms odd 1; merge even 0; multiply pairs odd 1; dP, dL odd 1;
    merge even 0; transpose states odd 1; merge even 0; read states odd 1; merge even 0; load odd 0; transpose
    pairs odd 1; merge even 0; R even 0; sum along keys even 1; merge even 0; square keys odd 0; sum crossing
    pairs odd 1; dP, dL odd 1; apply T even 0; dq, dk odd 1; differentiate norms even 1; invert norms odd 0;
    store even 1; choose factors odd 0; sum along keys odd 1; transpose pairs odd 1; apply T even 0; multiply
    terms odd 1; dq, dk odd 1; differentiate norms odd 1; dbeta odd 1; store odd 1; sum crossing pairs odd 1;
    sum decays odd 0; sum along keys odd 1; dR even 0; shorten keys odd 0; dbeta even 1; dg odd 1; dS even 0;
    U even 0; gates odd 0; transpose keys odd 0; R even 0; sum terms odd 1; L, P odd 0; differentiate norms
    odd 1; U even 0; spread columns odd 0; transpose gradients even 0; dbeta odd 1; substitute odd 0; dR even
    0; multiply pairs even 0; transpose states even 0; dP, dL even 0; merge odd 0; store odd 1; dg odd 1;
    merge odd 0; dS even 0; merge odd 0; read states even 0; transpose gradients even 0; merge odd 0; multiply
    pairs even 0; multiply terms even 0; sum terms even 0; merge odd 0
""")

LAYER_FORWARD = read_order("""
    window all 0; taps all 0; D even 1; D odd 1; h even 8; window all 0; window all 0; load even 0; square
    keys even 0; weight D even 1; taps all 0; taps all 0; merge all 3; window all 0; window all 0; list
    columns odd 2; window all 0; square o even 4; window all 0; window all 0; load odd 0; transpose q odd 2;
    invert norm of o even 5; transpose k odd 1; invert norm of o odd 4; merge all 3; spread columns all 2;
    transpose q even 0; sum decays odd 0; sum decays even 0; invert norms even 0; transpose scaled q even 2;
    substitute all 2; transpose scaled q odd 3; merge all 3; window all 0; scale k even 2; R odd 3; silu all
    0; P even 1; taps all 0; taps all 0; L even 1; taps all 0; taps all 0; silu all 0; silu all 0; taps all 0;
    taps all 0; taps all 0; merge all 3; silu all 0; square keys odd 0; silu all 0; substitute all 2; P T even
    3; scale k odd 1; W even 3; P T odd 3; window all 0; window all 0; substitute all 2; S even 3; gates even
    0; gate even 3; gate odd 3; O odd 3; y odd 8; window all 0; silu all 0; window all 0; W odd 3; window all
    0; O even 3; merge all 2; silu all 0; scale q odd 1; y even 8; window all 0; scale q even 0; silu all 0;
    silu all 0; invert norms odd 0; silu all 0; weight D odd 1; taps all 0; square o odd 3; P odd 2; taps all
    0; silu all 0; scale v even 2; merge all 2; taps all 0; silu all 0; silu all 0; silu all 0; silu all 0;
    taps all 0; S odd 3; R even 2; silu all 0; taps all 0; merge all 2; transpose k even 0; window all 0;
    merge all 2; gates odd 0; L odd 1; h odd 7; taps all 0; scale v odd 1; merge all 2; list columns even 1
""")

LAYER_BACKWARD = read_order("""
    load taps even 0; load taps odd 0; transpose states odd 2; dP, dL odd 2; sum taps even 2; dz odd 1; load u
    even 1; slope of u even 1; multiply taps even 2; store dx odd 3; sum taps even 2; transpose pairs odd 2;
    load rows even 0; read states odd 2; slope of z even 0; merge even 1; load taps even 2; dq, dk odd 2;
    merge even 1; square o even 0; gate even 0; load taps even 2; invert norms odd 1; multiply terms odd 2;
    sum taps even 2; merge even 1; sum terms odd 2; store dx even 2; sum crossing pairs odd 2; load state even
    1; invert norm of o even 0; merge even 1; sum along keys odd 2; store dx even 2; load u odd 1; merge even
    1; dg even 2; R even 1; merge even 1; h even 0; load even 0; slope of u odd 1; merge even 1; multiply rows
    even 0; choose factors odd 1; multiply taps even 2; dS odd 2; load taps odd 2; merge even 1; differentiate
    norms odd 2; load taps even 1; dz even 0; sum decays odd 1; shorten keys odd 1; sum taps even 2; square
    keys even 0; gates odd 1; merge even 1; sum decays even 0; multiply taps even 2; transpose keys odd 1;
    apply T even 1; dbeta odd 2; L, P odd 1; sum taps even 2; du odd 2; dR even 1; spread columns odd 1;
    multiply taps odd 2; invert norms even 0; substitute odd 1; U even 1; load taps odd 2; load taps odd 2;
    transpose gradients even 1; multiply pairs even 1; dP, dL even 1; transpose states even 1; read states
    even 1; merge odd 1; transpose pairs even 1; sum taps odd 2; merge odd 1; dq, dk even 1; load rows odd 0;
    multiply taps odd 2; square o odd 0; store dx even 2; do even 0; sum crossing pairs even 1; multiply taps
    odd 2; merge odd 1; sum taps odd 2; sum along keys even 1; load taps odd 2; load taps odd 2; store dx odd
    2; slope of z odd 0; sum taps odd 2; multiply taps odd 2; multiply taps odd 2; merge odd 1; store dx even
    2; dg odd 2; dS even 1; merge odd 1; choose factors even 0; differentiate norms even 1; multiply taps odd
    2; invert norm of o odd 0; sum taps odd 2; du even 1; merge odd 1; gate odd 0; sum taps odd 2; multiply
    taps odd 2; sum taps odd 2; merge odd 1; store dx odd 2; h odd 0; load state odd 1; shorten keys even 0;
    multiply taps even 1; gates even 0; merge odd 1; multiply terms even 1; merge odd 1; R odd 1; sum terms
    even 1; apply T odd 1; multiply rows odd 0; multiply taps odd 2; sum taps odd 2; load taps even 1; store
    dx odd 2; load taps even 1; multiply taps even 1; transpose keys even 0; L, P even 0; sum taps odd 2;
    multiply taps even 1; sum taps even 1; U odd 1; load taps odd 1; load odd 0; dbeta even 1; sum taps even
    1; do odd 0; spread columns even 0; load taps even 1; multiply taps even 1; sum taps even 1; dR odd 1;
    substitute even 0; multiply taps even 1; transpose gradients odd 1; square keys odd 0; multiply pairs odd
    1; load taps even 1; load taps odd 1
""")

CHANNELS_FORWARD = read_order("""
    load odd 0; load even 0; O odd 4; W even 3; merge all 2; pairs even 1; normalize even 0; S odd 4; merge
    all 2; S even 3; R odd 3; merge all 2; merge all 2; sum channels odd 1; weigh pairs even 1; merge all 2;
    list columns even 1; pairs odd 1; R even 2; merge all 2; weigh pairs odd 1; merge all 2; sum channels even
    0; list columns odd 1; merge all 2; normalize odd 0; merge all 2; spread columns all 1; P T even 2; scale
    keys odd 1; transpose q, k even 0; scale keys even 0; substitute all 1; W odd 3; transpose q, k odd 0;
    substitute all 1; substitute all 1; factors even 0; factors odd 0; P T odd 2; strengths odd 0; O even 2;
    strengths even 0
""")

CHANNELS_BACKWARD = read_order("""
    R odd 1; merge odd 1; merge odd 1; load even 0; begin dg even 1; merge odd 1; normalize even 0; merge odd
    1; levels 2 even 1; levels 1 even 1; transpose q, k even 0; sum channels even 0; strengths even 0; dS even
    1; apply T odd 1; levels 3 even 1; levels 2 even 1; U odd 1; levels 4 even 1; R odd 1; norms odd 2; levels
    3 even 1; factors even 0; apply T odd 1; pairs even 0; weigh pairs even 0; U odd 1; dR by channel odd 1;
    list columns even 0; transpose gradients odd 1; levels 4 even 1; sum along even 1; dS odd 1; multiply
    pairs odd 1; spread columns even 0; scale keys even 0; dR by channel odd 1; round pairs odd 1; substitute
    even 0; mask pairs odd 1; transpose states odd 1; read channels odd 1; transpose gradients odd 1; store
    keys odd 2; transpose states odd 1; merge even 0; multiply pairs odd 1; norms even 1; begin dg odd 1; sum
    rows odd 2; round pairs odd 1; merge even 0; load odd 0; levels 1 odd 1; merge even 0; levels 2 odd 1;
    merge even 0; merge even 0; R even 0; sum rows even 1; merge even 0; levels 3 odd 1; read channels odd 1;
    merge even 0; merge even 0; normalize odd 0; merge even 0; begin dg odd 1; strengths odd 0; mask pairs odd
    1; levels 1 odd 1; apply T even 0; apply T even 0; levels 2 odd 1; U even 0; levels 4 odd 1; sum along odd
    1; levels 3 odd 1; norms odd 1; R even 0; dR by channel even 0; levels 4 odd 1; store keys even 1; sum
    along odd 1; dS odd 1; transpose q, k odd 0; sum channels odd 0; sum rows even 1; dS even 0; factors odd
    0; U even 0; transpose gradients even 0; pairs odd 0; weigh pairs odd 0; list columns odd 0; sum along
    even 1; multiply pairs even 0; spread columns odd 0; transpose states even 0; store keys odd 1; dR by
    channel even 0; scale keys odd 0; round pairs even 0; transpose gradients even 0; substitute odd 0; mask
    pairs even 0; norms even 1; read channels even 0; merge odd 0; multiply pairs even 0; transpose states
    even 0; merge odd 0; begin dg even 0; round pairs even 0; sum rows odd 1; merge odd 0; mask pairs even 0;
    store keys even 1; read channels even 0; merge odd 0; levels 1 even 0; merge odd 0
""")
