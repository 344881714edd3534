//! The tokens of a tenant's batches that have not ended: OpenAI's enqueued tokens.

use super::batch::BatchRecord;
use super::line::LineError;
use super::service::Batches;
use crate::store;
use crate::store::conversation::Order;
use crate::store::documents::DocumentKey;

/// Why a batch that needs so many tokens fails beside others that have `used`.
pub(super) fn refusal(max: u64, used: u64, needed: u64) -> Option<LineError> {
    (used.saturating_add(needed) > max).then(|| {
        let message = format!(
            "Enqueued token limit reached: Limit {max}, Used {used}, Needed {needed} enqueued tokens. \
             Please try again once some batches have ended."
        );
        LineError::new("token_limit_exceeded", message, None)
    })
}

impl Batches {
    /// The tokens of the other batches of the same tenant. Batches that are validated at the same time do not see each
    /// other, and a record that cannot be read counts nothing: otherwise it would keep all others from being validated.
    pub(super) async fn queued_tokens(&self, of: &DocumentKey) -> Result<u64, store::Error> {
        let mut sum = 0_u64;
        let count = |record: &BatchRecord| {
            if record.id != of.id && !record.status.is_terminal() {
                sum = sum.saturating_add(record.tokens);
            }
            // All are counted: it is never the one that is looked for.
            false
        };
        self.find(of.tenant, Order::NewestFirst, count).await?;
        Ok(sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_fits_up_to_the_limit() {
        for (used, needed, fits) in [(0, 100, true), (60, 40, true), (60, 41, false)] {
            let refused = refusal(100, used, needed);
            assert_eq!(refused.is_none(), fits, "{used} {needed}");
        }
        let error = refusal(100, u64::MAX, 1).unwrap();
        assert_eq!((&*error.code, error.line), ("token_limit_exceeded", None));
        assert!(
            error
                .message
                .contains("Limit 100, Used 18446744073709551615, Needed 1 ")
        );
    }
}
