/* Feature detection: declares fa_cpu_has_<isa>() for every line of isa.inc. */
#ifndef FASTATTN_CPU_H
#define FASTATTN_CPU_H

#define FA_ISA(name, arch, flags) int fa_cpu_has_##name(void);
#include "isa.inc"
#undef FA_ISA

#endif
