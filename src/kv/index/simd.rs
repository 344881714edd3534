//! What no safe and portable code says as fast: asking for a cache line ahead of its use,
//! and comparing eight words at once.
//!
//! Both together, with loads and a plain loop in their place before; CPU of the whole corpus, beside the
//! peer's in the same run (kv-index 2.0.0, ChainIndex; 2 cores, shared, 2026-11-21):
//!
//! | workers | before | with | the peer, each time |
//! |---|---|---|---|
//! | 8 | 0.179 s | 0.147 s | 0.161, 0.161 s |
//! | 64 | 0.104 s | 0.083 s | 0.084, 0.088 s |
//! | 512 | 0.135 s | 0.094 s | 0.108, 0.097 s |

/// Asks for the cache line of a value, and waits for nothing.
#[inline(always)]
pub(super) fn prefetch<T>(it: &T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        #[expect(
            unsafe_code,
            reason = "a hint that reads nothing, of a place that is there"
        )]
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(it).cast());
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = it;
}

/// The places of a value among eight, a bit each.
#[inline(always)]
pub(super) fn places_of(value: u32, all: &[u32; 8]) -> u32 {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{
            _mm_cmpeq_epi32, _mm_movemask_epi8, _mm_packs_epi16, _mm_packs_epi32, _mm_set_epi32,
            _mm_set1_epi32, _mm_setzero_si128,
        };
        // The loads become two.
        let [a, b, c, d, e, f, g, h] = all.map(u32::cast_signed);
        #[expect(
            unsafe_code,
            reason = "SSE2, which all such processors have, on values alone"
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
    all.fold(0, |places, (at, it)| places | u32::from(*it == value) << at)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn places_are_those_of_the_portable_code(
            all in proptest::array::uniform8(prop_oneof![Just(0u32), Just(7), Just(1 << 31), any::<u32>()]),
            value in prop_oneof![Just(0u32), Just(7), Just(1 << 31)],
        ) {
            prop_assert_eq!(places_of(value, &all), portable(value, &all));
            for value in all {
                prop_assert_eq!(places_of(value, &all), portable(value, &all));
            }
        }
    }
}
