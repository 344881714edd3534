//! Two operations that safe, portable code does not do as fast: prefetching a cache line, and comparing
//! eight words at once.
//!
//! CPU of the index over the whole benchmark trace, with plain loads and a loop instead (without) and
//! with both, beside another index in the same runs (kv-index 2.0.0, ChainIndex; 2 cores, shared,
//! 2026-11-21):
//!
//! | workers | without | with | ChainIndex in both runs |
//! |---|---|---|---|
//! | 8 | 0.179 s | 0.147 s | 0.161, 0.161 s |
//! | 64 | 0.104 s | 0.083 s | 0.084, 0.088 s |
//! | 512 | 0.135 s | 0.094 s | 0.108, 0.097 s |

/// Asks for the cache line of a value without waiting for it.
#[inline(always)]
pub(in crate::kv) fn prefetch<T>(value: &T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        #[expect(
            unsafe_code,
            reason = "a hint that reads nothing, for the address of a live reference"
        )]
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(value).cast());
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = value;
}

/// Which of eight words equal a value, a bit each.
#[inline(always)]
pub(super) fn matching_lanes(value: u32, all: &[u32; 8]) -> u32 {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{
            _mm_cmpeq_epi32, _mm_movemask_epi8, _mm_packs_epi16, _mm_packs_epi32, _mm_set_epi32,
            _mm_set1_epi32, _mm_setzero_si128,
        };
        // The compiler merges the loads into two.
        let [a, b, c, d, e, f, g, h] = all.map(u32::cast_signed);
        #[expect(
            unsafe_code,
            reason = "SSE2, which all x86-64 processors have, on values only"
        )]
        unsafe {
            let wanted = _mm_set1_epi32(value.cast_signed());
            let low = _mm_cmpeq_epi32(_mm_set_epi32(d, c, b, a), wanted);
            let high = _mm_cmpeq_epi32(_mm_set_epi32(h, g, f, e), wanted);
            let bytes = _mm_packs_epi16(_mm_packs_epi32(low, high), _mm_setzero_si128());
            _mm_movemask_epi8(bytes).cast_unsigned()
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    portable(value, all)
}

#[cfg(any(test, not(target_arch = "x86_64")))]
fn portable(value: u32, all: &[u32; 8]) -> u32 {
    let all = all.iter().enumerate();
    all.fold(0, |lanes, (lane, word)| {
        lanes | u32::from(*word == value) << lane
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn matching_lanes_are_those_of_the_portable_code(
            all in proptest::array::uniform8(prop_oneof![Just(0u32), Just(7), Just(1 << 31), any::<u32>()]),
            value in prop_oneof![Just(0u32), Just(7), Just(1 << 31)],
        ) {
            prop_assert_eq!(matching_lanes(value, &all), portable(value, &all));
            for value in all {
                prop_assert_eq!(matching_lanes(value, &all), portable(value, &all));
            }
        }
    }
}
