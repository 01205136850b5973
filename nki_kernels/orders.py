"""Has the orders in which the kernels issue their stages; `tools/schedule.py` writes this file.

`nki_kernels.schedule` says what an entry means. MADE has the orders that a search of that program made, with
its estimates in microseconds on Trn1 for each of the program's SIZES. Any other is older than the program.
"""

from delta_trn.nki_kernels.schedule import read_order

MADE = {
    "RULE_BACKWARD": (527.74, 538.64, 322.29),
}

RULE_FORWARD = read_order("""
    list columns odd 4; scale q odd 3; load odd 0; transpose q odd 1; merge all 5; merge all 6; L even 4;
    square keys even 2; weight D odd 3; merge all 5; P T even 6; transpose scaled q even 4; invert norms odd
    2; list columns even 4; merge all 5; R odd 6; P odd 6; gates even 3; spread columns all 4; transpose k odd
    1; merge all 5; invert norms even 2; W even 6; gates odd 2; substitute all 4; D even 3; O even 6; D odd 2;
    square keys odd 1; scale v odd 5; L odd 3; scale k odd 4; merge all 5; substitute all 4; transpose k even
    3; scale v even 3; W odd 6; merge all 5; sum decays even 2; sum decays odd 1; scale k even 4; S even 6; P
    T odd 6; substitute all 4; merge all 5; O odd 6; transpose scaled q odd 3; P even 5; merge all 5; scale q
    even 3; R even 5; weight D even 3; S odd 6; transpose q even 3; load even 1
""")

RULE_BACKWARD = read_order("""
    load even 0; differentiate norms even 1; dbeta even 1; square keys even 0; sum along keys even 1; sum
    decays even 0; dR odd 1; invert norms even 0; dg odd 2; dS odd 1; choose factors even 0; U odd 1; shorten
    keys even 0; gates even 0; transpose keys even 0; store even 1; sum terms even 1; dg even 3; dg odd 2; L,
    P even 0; transpose gradients odd 1; multiply pairs odd 1; spread columns even 0; dP, dL odd 1; transpose
    gradients odd 1; transpose pairs odd 1; substitute even 0; multiply pairs odd 1; differentiate norms even
    1; dP, dL odd 1; transpose states odd 1; transpose states odd 1; merge even 0; sum crossing pairs odd 1;
    merge even 0; merge even 0; dbeta even 1; merge even 0; merge even 0; merge even 0; read states odd 1;
    transpose pairs odd 1; merge even 0; store even 1; multiply terms odd 1; dq, dk odd 1; merge even 0; R
    even 0; load odd 0; merge even 0; sum along keys odd 1; sum terms odd 1; square keys odd 0; read states
    odd 1; apply T even 0; apply T even 0; invert norms odd 0; sum crossing pairs odd 1; U even 0; multiply
    terms odd 1; dq, dk odd 1; sum along keys odd 1; choose factors odd 0; dR even 0; sum decays odd 0; dS
    even 0; R even 0; differentiate norms odd 1; shorten keys odd 0; gates odd 0; transpose keys odd 0; store
    odd 1; dg even 1; L, P odd 0; differentiate norms odd 1; sum terms odd 1; U even 0; spread columns odd 0;
    dbeta odd 1; transpose gradients even 0; dR even 0; substitute odd 0; transpose states even 0; transpose
    gradients even 0; multiply pairs even 0; dP, dL even 0; merge odd 0; transpose states even 0; merge odd 0;
    multiply pairs even 0; merge odd 0; dP, dL even 0; merge odd 0; merge odd 0; R odd 0; sum crossing pairs
    even 0; merge odd 0; dbeta odd 1; read states even 0; merge odd 0; store odd 1; sum crossing pairs even 0;
    merge odd 0; multiply terms even 0; transpose pairs even 0; sum terms even 0; merge odd 0; transpose pairs
    even 0; read states even 0; apply T odd 0; apply T odd 0; multiply terms even 0; dq, dk even 0; sum along
    keys even 0; dR odd 0; U odd 0; dS odd 0; dS even 0; R odd 0; dq, dk even 0
""")

LAYER_FORWARD = read_order("""
    taps all 0; window all 0; P T even 6; transpose k even 3; window all 0; transpose q even 5; window all 0;
    window all 0; h even 7; window all 0; window all 0; transpose k odd 3; silu all 0; invert norms even 2;
    invert norms odd 2; transpose scaled q odd 5; substitute all 5; taps all 0; silu all 0; taps all 0; taps
    all 0; sum decays even 2; window all 0; window all 0; W even 6; taps all 0; load odd 1; transpose q odd 4;
    W odd 6; substitute all 5; O even 6; invert norm of o odd 7; list columns odd 4; load even 1; sum decays
    odd 1; merge all 5; S even 6; taps all 0; scale q even 4; square o even 6; merge all 5; L even 3; R even
    5; merge all 5; list columns even 4; D even 2; D odd 1; transpose scaled q even 5; window all 0; taps all
    0; silu all 0; invert norm of o even 6; window all 0; merge all 5; taps all 0; silu all 0; silu all 0;
    scale k odd 5; merge all 5; R odd 6; L odd 3; merge all 5; P odd 6; window all 0; S odd 6; h odd 7; gate
    even 5; y even 7; gates even 2; gates odd 2; silu all 0; P T odd 6; spread columns all 4; window all 0;
    substitute all 4; gate odd 5; window all 0; merge all 5; taps all 0; scale v even 3; silu all 0; taps all
    0; square keys even 1; y odd 7; O odd 6; silu all 0; window all 0; taps all 0; taps all 0; silu all 0;
    scale q odd 4; taps all 0; merge all 5; square keys odd 1; weight D even 2; scale k even 5; square o odd
    6; silu all 0; P even 5; silu all 0; merge all 5; weight D odd 2; scale v odd 5; silu all 0; taps all 0;
    silu all 0; silu all 0
""")

LAYER_BACKWARD = read_order("""
    load taps odd 3; load rows even 1; load taps even 2; du odd 3; square o even 1; multiply pairs even 2;
    dbeta odd 3; invert norm of o even 1; multiply taps odd 3; dP, dL even 2; load taps odd 3; transpose
    states even 2; read states even 2; load taps odd 3; merge odd 2; load taps odd 3; dg odd 3; merge odd 2;
    multiply terms even 2; sum taps even 3; merge odd 2; slope of z even 1; load even 1; square keys even 1;
    load taps odd 3; dS even 2; sum taps odd 3; sum terms even 2; multiply taps odd 3; merge odd 2; transpose
    pairs even 2; dbeta even 2; gate even 1; invert norms even 1; merge odd 2; sum crossing pairs even 2;
    store dx even 3; sum taps odd 3; load odd 1; multiply taps odd 3; h even 1; multiply taps odd 3; merge odd
    2; square keys odd 1; store dx even 3; dq, dk even 2; load state odd 2; merge odd 2; multiply rows even 1;
    sum along keys even 2; sum decays even 1; dg even 2; choose factors even 1; merge odd 2; R odd 2; sum taps
    odd 3; differentiate norms even 2; do even 1; shorten keys even 1; gates even 1; merge odd 2; load taps
    odd 2; multiply taps odd 3; du even 2; transpose keys even 1; apply T odd 2; L, P even 1; sum taps odd 3;
    load rows odd 1; square o odd 1; sum taps odd 3; dR odd 2; spread columns even 1; multiply taps odd 3; sum
    decays odd 1; load taps even 2; sum taps odd 3; store dx odd 3; U odd 2; load taps even 2; invert norm of
    o odd 1; load taps even 2; load taps even 2; multiply taps even 2; substitute even 1; transpose gradients
    odd 2; multiply pairs odd 2; dP, dL odd 2; transpose states odd 2; merge even 1; read states odd 2; store
    dx odd 3; transpose pairs odd 2; merge even 1; h odd 1; multiply terms odd 2; gate odd 1; sum terms odd 2;
    load u odd 2; load taps even 2; merge even 1; dS odd 2; sum taps even 2; sum crossing pairs odd 2; merge
    even 1; load state even 1; invert norms odd 1; multiply taps even 2; store dx odd 3; dq, dk odd 2; choose
    factors odd 1; merge even 1; multiply taps even 2; sum taps even 2; R even 1; sum along keys odd 2; merge
    even 1; slope of z odd 1; shorten keys odd 1; sum taps even 2; slope of u odd 2; merge even 1; store dx
    even 2; multiply rows odd 1; merge even 1; load u even 1; differentiate norms odd 2; multiply taps even 2;
    do odd 1; slope of u even 1; sum taps even 2; gates odd 1; merge even 1; multiply taps even 2; dz even 1;
    transpose keys odd 1; apply T even 1; L, P odd 1; sum taps even 2; dz odd 1; multiply taps even 2; U even
    1; dR even 1; spread columns odd 1; substitute odd 1; transpose gradients even 1
""")
