/* The macros that a kernel is compiled with, each with a value for whoever opens a file alone. source.py defines them
   before the first line; what the values mean is said where they are used. */
#pragma once

#ifndef REAL_IS_DOUBLE
#define REAL_IS_DOUBLE 0 /* whether arithmetic is in double */
#endif

#ifndef X
#define X float /* element types of the input and the target, of row weights and of losses: vector.cuh */
#define Y float
#define WEIGHT double
#define LOSS float
#endif

#ifndef DX
#define DX X /* element types of gradients */
#define DY Y
#endif

#ifndef WIDTH
#define WIDTH 4 /* elements of an access to global memory */
#endif

#ifndef THREADS
#define THREADS 256 /* of a block, in kernels that are not of logits */
#endif

#ifndef UNROLL
#define UNROLL 4 /* accesses in flight a thread */
#endif

#ifndef MIN_BLOCKS
#define MIN_BLOCKS 1 /* of a multiprocessor: bounds the registers */
#endif

#ifndef WANT_SUM
#define WANT_SUM 1 /* whether losses are wanted, or numbers of rows; and gradients of the input, of the target */
#define WANT_INPUT 1
#define WANT_TARGET 1
#endif

#ifndef KEEPS_NUMBERS
#define KEEPS_NUMBERS 0 /* whether a row's state, statistics or sums are wanted, by which gradients are found later */
#endif

/* Whether what is read has 16 bits; and whether that has, or all gradients, now or later: exponents may then be rounded by more */
#define IS_16_BIT (sizeof(X) == 2 && sizeof(Y) == 2)
#define HAS_SHORT_GRADIENTS (!KEEPS_NUMBERS && (!WANT_INPUT || sizeof(DX) == 2) && (!WANT_TARGET || sizeof(DY) == 2))
#define IS_COARSE (IS_16_BIT || HAS_SHORT_GRADIENTS)

#ifndef FLAT
#define FLAT 0                /* literal.cuh: whether all is one row, shared by the grid */
#define LANES 32              /* threads that share a row */
#define X_LOW ((real)1e-30)   /* the range in which an element needs no guards (forms.py) */
#define X_HIGH ((real)1e6)
#define Y_LOW X_LOW
#define Y_HIGH X_HIGH
#endif

#ifndef HAS_SMOOTHING
#define HAS_SMOOTHING 0 /* whether a row's label is smoothed: its logits are summed, and each has less of the gradient */
#endif

#ifndef IS_LOGITS
#define IS_LOGITS 1 /* topk.cuh: what the row holds, and whether its logits are capped */
#define IS_PROBS 0
#define IS_CAPPED 0
#define HAS_MEAN 0 /* whether the mean of a row of logits is gathered, too */
#define FROM_LOGITS 0 /* what a teacher's entries are */
#define FROM_PROBS 0
#endif

#ifndef IGNORED
#define IGNORED (-100) /* labels.cuh, cross_entropy.cuh: the label of a row that has none */
#endif

#ifndef EXCHANGE_SLOTS
#define EXCHANGE_SLOTS 2 /* places for what blocks of a cluster tell each other of a row */
#endif

#ifndef HAS_TARGET
#define HAS_TARGET 1 /* describe.cuh: whether there are two sides, and they have one temperature */
#define ONE_TEMPERATURE 1
#endif

#ifndef INPUT_IS_CAPPED
#define INPUT_IS_CAPPED 0 /* whether a logit x counts as softcap · tanh(x / softcap) */
#define TARGET_IS_CAPPED 0
#endif
