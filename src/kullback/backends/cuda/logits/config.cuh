/* What a kernel for logits is compiled for, and what follows from it. The macros are defined before the first line
   (logits/__init__.py); here they have values for whoever opens a file alone. */
#pragma once

#include "cuda/functor.cuh"
#include "cuda/vector.cuh"
#include "cuda/warp.cuh"

#ifndef VERB
#define VERB VERB_LOSS
#define INPUT_IS_LOGITS 1
#define TARGET_IS_LOGITS 1
#define HAS_AUXILIARY 0   /* whether a row's loss is more than its divergence (labels.cuh) */
#define WANT_FIGURES 0    /* whether a row's log-sum-exp and entropy are wanted */
#define HAS_PEERS 0       /* whether each rank has a slice of the rows (ranks.cuh) */
#define WRITES_LOSSES 0   /* whether each row's is wanted, and not their total alone */
#define KNOWN 0           /* whether the rows' states are known, and only gradients wanted */
#define RESIDENT 1        /* whether rows stay on chip (sm_90 and later), or are read again for each pass */
#define CACHES_SLOPES 0   /* whether the sweep that sums a row that is far leaves masses and slopes in its place */
#define FITS_SERIES 1       /* whether the kind is a power series in the log-ratio near p = q (series.py), of so many terms, */
#define SERIES_TERMS 7    /* and how far that reaches */
#define SERIES_RADIUS 0.5f
#define HAS_CORNER 0
#define MOST_TERMS 10     /* places for the factors of near rows' polynomials (near.py) */
#define NEAR_TERMS 10     /* of this kind how many powers from the first on, */
#define NEAR_TERM_STEP 2  /* and from one that is wanted to the next; 0: there are none */
#define NEAR_SLOPE_TERMS 8
#define NEAR_SLOPE_STEP 2
#define NEAR_RADIUS 2.5f
#define NARROW_TERMS 6    /* the same, but for steps, of rows of which few tokens are beyond a smaller radius; 0: there are none */
#define NARROW_SLOPE_TERMS 6
#define NARROW_RADIUS 1.0f
#define SLOPE_FACTOR 64.0f /* of slopes that are cached */
#define MOST_FINE_TERMS 17 /* likewise of polynomials that are as exact as float32 (near.py); FINE_TERMS 0: there are none */
#define FINE_TERMS 8
#define FINE_TERM_STEP 2
#define FINE_DIFFERENCES 11
#define FINE_DIFFERENCE_STEP 2
#define FINE_RADIUS 2.0f
#define CACHES_DERIVATIVES 0 /* whether the sweep that sums a row by these leaves masses and derivatives in its place */
#define HAS_REVERSE_KL_FACTOR 0 /* of `Divergence` (divergences.py), if it is known */
#define REVERSE_KL_FACTOR 0.0f
#define LEAST_MEAN_SLOPE (-REAL_INFINITY)
#define THREADS_PER_ROW 256 /* of a block; LOGICAL_WARP where that is less than a warp */
#define GROUPS 2            /* rows that a block works on at once */
#define SLOTS 2             /* of rows that are not resident, how many a row group has room for on chip, */
#define SLOT_VECTORS 0      /* and of how many vectors, as many as a row has; or 0 */
#define HAS_LEAD 0          /* whether a vocabulary is not whole lines of memory, so that rows begin within them */
#define HEADER_BYTES 48     /* of a stage's header (pipeline.cuh), at most */
#define Y_OFFSET 65536      /* bytes of shared memory from a stage's tile of x to that of y, where vectors are alike */
#define MAX_CLUSTER 8       /* blocks that share a row, at most */
#define EXCHANGE_SLOTS 2    /* of a row group's all-reduce */
#define SUMMARY_DOUBLES 4   /* of what is kept of a row until all have been read */
#define PARTIAL_BYTES 16    /* of what a warp sends of a row, at most */
#endif

#define HAS_FAST (INPUT_IS_LOGITS && TARGET_IS_LOGITS)
#if !HAS_FAST
#undef HAS_LOG_FRACTION
#define HAS_LOG_FRACTION 0
#endif
#if !HAS_FAST || THREADS_PER_ROW <= 32 /* short rows have no registers for it, nor for a series */
#undef HAS_NEAR_ELEMENT
#define HAS_NEAR_ELEMENT 0
#endif
#define HAS_SERIES (FITS_SERIES && THREADS_PER_ROW > 32)
#define HANDLES_PEAKED (FITS_SERIES && !IS_COARSE)       /* 16-bit gradients do not show it */
#define REFINES_HEAVY (HAS_FAST && THREADS_PER_ROW > 32 && IS_COARSE) /* whether few tokens may have the exact formula */
#define HAS_NEAR (HAS_FAST && NEAR_TERM_STEP && THREADS_PER_ROW > 32) /* whether polynomials may serve, where gradients are coarse */

/* Whether rows whose gradients are not coarse have elements of their own (fine.cuh): by log-ratios, beside one mass or in polynomials; or,
   of a kind with a corner, by the stable formula, where derivatives are cached */
#define HAS_FINE \
    (HAS_FAST && THREADS_PER_ROW > 32 && (HAS_NEAR_ELEMENT || FINE_TERMS || (HAS_CORNER && CACHES_DERIVATIVES && RESIDENT)))
#if !HAS_FINE || HAS_NEAR_ELEMENT || !RESIDENT
#undef CACHES_DERIVATIVES
#define CACHES_DERIVATIVES 0
#endif

/* Whether threads copy their rows to the chip, each while the one before is worked on */
#define COPIES_ROWS (SLOT_VECTORS > 0)
#define ON_CHIP (RESIDENT || COPIES_ROWS)

/* Whether gradients of a row that is close are written by its moments, in the sweep that sums its terms */
#define SUMS_WHILE_WRITING \
    (HAS_SERIES && SUMS_FROM_MOMENTS && IS_COARSE && VERB == VERB_LOSS && !KNOWN && (WANT_INPUT || WANT_TARGET))

/* Whether rows that one sure token has count as near, however small their sum (sure.cuh), where gradients are coarse */
#define HAS_SURE_ROWS (HAS_SERIES && SUMS_FROM_MOMENTS && RESIDENT && !HAS_PEERS && VERB == VERB_LOSS && !KNOWN)

/* Whether log-ratios and one mass may serve rows whose gradients are not coarse: by their sum errors are known, too. */
#define HAS_FINE_NEAR (HAS_NEAR_ELEMENT && HAS_SURE_ROWS && !IS_COARSE && (WANT_INPUT || WANT_TARGET))

/* Whether log-sum-exps are given: by the statistics that sums are to be accumulated with, or by the rows' states */
#define HAS_NORMALISERS (KNOWN || VERB == VERB_ACCUMULATE)

/* Whether the row's sums follow from what is found while it is normalised */
#if HAS_FAST && HAS_MOMENTS
#define SUMS_FROM_MOMENTS 1
#else
#define SUMS_FROM_MOMENTS 0
#undef HAS_P_LOG_RATIO
#undef HAS_Q_LOG_RATIO
#undef HAS_CHERNOFF
#define HAS_P_LOG_RATIO 0
#define HAS_Q_LOG_RATIO 0
#define HAS_CHERNOFF 0
#endif

/* Whether the log-ratio's mean under q says which arithmetic to try first, so that close rows need not be summed as if they
   were far; and what to expect of slopes that are cached. Of short rows only those in 16 bits need it. */
#define FORESEES_CLOSE \
    (FITS_SERIES && (THREADS_PER_ROW > 32 || (CACHES_SLOPES && WIDTH == 8)) && !SUMS_FROM_MOMENTS && HAS_REVERSE_KL_FACTOR)
#define PREDICTS_SLOPE (FORESEES_CLOSE && CACHES_SLOPES)
/* Long rows predict a slope by the log-ratio's variance too. Short ones bound each ratio below by this, to base 2: a slope has a
   least value, and a ratio has none. */
#define HAS_Q_SQUARED (PREDICTS_SLOPE && THREADS_PER_ROW > 32)
#define HAS_Q_BOUNDED (PREDICTS_SLOPE && THREADS_PER_ROW <= 32)
#define LEAST_LOG2_RATIO -24.0f
#if FORESEES_CLOSE
#undef HAS_Q_LOG_RATIO
#define HAS_Q_LOG_RATIO 1
#endif
/* Where nothing of the kind foresees it, or not enough, whether a sample of the row does */
#define SAMPLES_SPREAD \
    (((HAS_NEAR || (HAS_CORNER && HAS_FAST && THREADS_PER_ROW > 32)) && !SUMS_FROM_MOMENTS && !FORESEES_CLOSE) \
     || ((REFINES_HEAVY || HAS_FINE_NEAR) && SUMS_FROM_MOMENTS && !HAS_NORMALISERS))
#define HAS_LOG_RATIOS (HAS_P_LOG_RATIO || HAS_Q_LOG_RATIO)
/* Whether moments may have guards for -inf: a row group takes them from the first row on that holds it. Rows that do seldom
   alternate with others. */
#define HAS_GUARDS (THREADS_PER_ROW > 32 && SUMS_FROM_MOMENTS)

/* Whether a thread keeps the largest parts of Σ exp and of moments out of its sums, so that what others add is not rounded as those
   are: a row's sum is what is left where they cancel. Of short rows a thread adds little. In a total the roundings of rows even out, and
   16 bits hide those of gradients. */
#define KEEPS_LARGEST \
    (SUMS_FROM_MOMENTS && THREADS_PER_ROW > 32 \
     && !(VERB == VERB_LOSS && !WRITES_LOSSES && !KEEPS_NUMBERS && (IS_16_BIT || (IS_COARSE && (WANT_INPUT || WANT_TARGET)))))

/* A sum above this was no number, or a Σ exp against a maximum that was estimated far too low */
#define MAX_SUM 1e15f
/* In nats: how far above a sample's maximum the row's is taken to be */
#define MAX_MARGIN (IS_COARSE ? 12.0f : 8.0f)
/* Whether maxima are found and not estimated: short rows of float32, of which that is seen */
#define IS_EXACT (!IS_COARSE && THREADS_PER_ROW <= 32)

namespace kullback {

enum { WARPS = THREADS_PER_ROW / LOGICAL_WARP, WANT_GRADIENT = WANT_INPUT || WANT_TARGET };
enum { X_BYTES = sizeof(Packed<X>), Y_BYTES = sizeof(Packed<Y>) }; /* of a vector */
/* Places of moments */
enum {
    P_LOG_RATIO = 0,
    Q_LOG_RATIO = HAS_P_LOG_RATIO,
    CHERNOFF = Q_LOG_RATIO + HAS_Q_LOG_RATIO,
    Q_SQUARED = CHERNOFF + HAS_CHERNOFF,
    Q_BOUNDED = Q_SQUARED + HAS_Q_SQUARED,
    MOMENTS = Q_BOUNDED + HAS_Q_BOUNDED
};

}
