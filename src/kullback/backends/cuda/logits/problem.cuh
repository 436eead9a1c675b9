/* Rows of a divergence of which a side or both are logits: a row is normalised, summed, and its gradients written.
   The formula is pasted above as `k_element`, where both sides are logits also as `apart_element`, `close_element` and,
   if it has slopes, `apart_parts`, and as `finish`; so are the macros

   X, Y, WEIGHT, LOSS               element types of input, target, row weights, losses
   INPUT_IS_LOGITS, TARGET_IS_LOGITS
   INPUT_IS_CAPPED, TARGET_IS_CAPPED  whether a logit x counts as cap · tanh(x / cap)
   WANT_SUM, WANT_INPUT, WANT_TARGET  what to compute
   KNOWN                            whether the rows' states are known
   RESIDENT                         whether rows stay on chip (sm_90 and later), or are read again for each pass
   IS_SMOOTH, POWERS, REACH         whether the kind is a series in powers of the log-ratio near p = q (series.py), so many,
                                    and how far it reaches
   KEEPS_SLOPES                     whether the sweep that sums a row that is apart leaves masses and slopes in its place
   LANES, GROUPS                    threads of a block that share a row; rows that a block has in hand at once
   WIDTH, MIN_BLOCKS                elements of a 16-byte access; blocks of a multiprocessor
   HELD                             vectors of a row that a thread keeps in registers: all that it has; or 0
   TO_Y                             bytes of shared memory from a slot's part of x to that of y, where vectors are alike
   MAX_CLUSTER                      blocks that share a row, at most
   MAILBOXES, LETTER_BYTES          for what warps tell one another of a row: of each group; at most, each

   A resident row is spread over the blocks of a cluster. In each, one more warp fetches pieces of rows into a ring
   of slots in shared memory, by bulk copies, as far ahead as the ring allows. The groups take rows in turn: while
   one waits for the others of its row, another computes. Results depend on the launch shape, which depends on the
   device, the vocabulary and the tensors' layout alone. */

enum { WARPS = LANES / 32, WANT_GRADIENT = WANT_INPUT || WANT_TARGET };
enum { X_BYTES = sizeof(Packed<X>), Y_BYTES = sizeof(Packed<Y>) }; /* of a vector */
enum { APART, CLOSE, GUARDED }; /* vocabularies, in the order in which they are tried */
#define HAS_APART (INPUT_IS_LOGITS && TARGET_IS_LOGITS)
#if !HAS_APART
#define HAS_LOG_PART 0
#endif
#define HAS_SERIES (IS_SMOOTH && LANES > 32) /* short rows have no registers for it */
#define SEEKS_ONE_WORD (IS_SMOOTH && !IS_NARROW) /* 16-bit gradients do not show it */
/* Whether the row's sums follow from what is found while it is normalised */
#if HAS_APART && HAS_MOMENTS
#define IS_SURVEYED 1
#else
#define IS_SURVEYED 0
#define HAS_CROSS_P 0
#define HAS_CROSS_Q 0
#define HAS_OVERLAP 0
#endif
/* Whether the log-ratio's mean among the words that q chooses says what to try first, so that rows that are close need not
   be summed as if apart, and with its variance what to expect of slopes that are kept */
#define IS_FORETOLD (HAS_SERIES && !IS_SURVEYED)
#define HAS_SQUARE_Q (IS_FORETOLD && KEEPS_SLOPES)
#if IS_FORETOLD
#undef HAS_CROSS_Q
#define HAS_CROSS_Q 1
#endif
#define IS_CROSSED (HAS_CROSS_P || HAS_CROSS_Q)
enum { CROSS_P = 0, CROSS_Q = HAS_CROSS_P, OVERLAP = CROSS_Q + HAS_CROSS_Q, SQUARE_Q = OVERLAP + HAS_OVERLAP };
enum { MOMENTS = SQUARE_Q + HAS_SQUARE_Q };
/* Of a row whose sum is below the first, distributions count as close: 6e-8, which an element's term may be wrong
   by, would be more than 3e-6 of it; of 1 - overlap the rounding of a whole sum is left. A sum above the second was no
   number. */
#define LEAST_APART (HAS_OVERLAP ? 0.04f : 0.02f)
#define MOST 1e15f
/* A log-ratio to base 2, as far as it foretells something, and a variance of such that is believed */
#define MOST_BITS 10.0f
#define MOST_VARIED 16.0f
/* An exponent of no mass, and a number after any factor */
#define NO_MASS -1e4f
/* Whether tops are found and not guessed: short rows of float32, of which that is seen */
#define IS_EXACT (!IS_NARROW && LANES == 32)
/* In nats, of a row's largest logit above a sample's; and totals that are taken: those of smaller ones have lost masses that
   underflowed, those of larger have exponents that are rounded by too much */
#define USUAL_RANGE (IS_NARROW ? 12.0f : 8.0f)
#define LEAST_TOTAL 1e-20f
#define MOST_TOTAL (IS_NARROW ? MOST : 65536.0f)
/* No logit, but all that are masked by the least float lie below it */
#define NO_TOP -1e30f

struct Arguments {
    const X *x;
    const Y *y;
    X *input_gradient;
    Y *target_gradient;
    const WEIGHT *weights;     /* of each row; 0: 1 */
    const double *known_state; /* [7, rows], or 0 */
    double *state;             /* [7, rows], or 0 */
    LOSS *losses;              /* [rows], or 0 */
    LOSS *total;               /* or 0 */
    double *partial;           /* [clusters] */
    unsigned *ticket;
    unsigned rows, vocab; /* at most 2^30 each */
    long long x_stride, y_stride, input_gradient_stride, target_gradient_stride;
    double scale;
    Parameters parameters;
    float input_scale, target_scale; /* 1 / temperature */
    float input_cap, target_cap;
    float exponent;                  /* of the overlap that a survey sums */
    long long series[POWERS];        /* each two floats, factors of a power of the log-ratio: of term, above of d_log_q - d_log_p */
    int slots, slot_vectors, share, pieces; /* of the ring; vectors of a slot, of a block's share of a row; slots that it takes */
    int mail, barriers;                     /* offsets; in a mailbox of the mail: [values, size · WARPS] floats */
};

INLINE bool has_one_scale(const Arguments &a) { return a.input_scale == a.target_scale; }

INLINE float term_factor(const Arguments &a, int power) { return found_here(__int_as_float((int)a.series[power - 1])); }
INLINE float difference_factor(const Arguments &a, int power) { return found_here(__int_as_float((int)(a.series[power - 1] >> 32))); }

/* What an element of the input counts as, and of the target */
INLINE float input_of(const Arguments &a, float x) { return INPUT_IS_CAPPED ? k_capped(x, a.input_cap) : x; }
INLINE float target_of(const Arguments &a, float y) { return TARGET_IS_CAPPED ? k_capped(y, a.target_cap) : y; }
