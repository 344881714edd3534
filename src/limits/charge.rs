//! What an admitted request has reserved, until it ends.

use std::sync::Arc;

use smallvec::SmallVec;

use super::cost::Amount;
use super::gcra;
use super::limiter::Charged;
use super::tenant_limits::TenantLimits;
use crate::store::charges::{ChargeId, Settlement};

/// What an admitted request has reserved. When it is dropped, the reserve is corrected to what was used: nothing, unless
/// something else was said.
#[derive(Debug)]
#[must_use = "dropping the charge ends the request"]
pub struct Charge {
    limits: Arc<TenantLimits>,
    /// The names of the limits that it counts in.
    names: SmallVec<[Arc<str>; 2]>,
    id: ChargeId,
    charged: Charged,
    reserved: Amount,
    /// What is charged in the end.
    used: Amount,
}

impl Charge {
    pub(super) fn new(
        limits: &Arc<TenantLimits>,
        names: SmallVec<[Arc<str>; 2]>,
        id: ChargeId,
        charged: Charged,
        reserved: Amount,
    ) -> Self {
        Self {
            limits: limits.clone(),
            names,
            id,
            charged,
            reserved,
            used: Amount::default(),
        }
    }

    /// Whether it is a try of a line of a batch.
    pub fn is_line(&self) -> bool {
        self.id.is_line()
    }

    /// An engine is sent the request and reads the prompt; what it generates is not known yet. Lines of batches are
    /// charged once they are answered: one that gives way is sent again.
    pub fn on_sent(&mut self) {
        if !self.is_line() {
            self.use_output(0);
        }
    }

    /// What the engine says that the request used.
    pub fn use_tokens(&mut self, prompt_tokens: u64, cached_tokens: u64, output_tokens: u64) {
        let weights = &self.limits.limits.weights;
        self.used = weights.used(prompt_tokens, cached_tokens, output_tokens);
    }

    /// Output of an answer that ended without usage.
    pub fn use_output(&mut self, output_tokens: u64) {
        self.used = Amount {
            output_tokens,
            ..self.reserved
        };
    }

    /// No engine has worked for the request: everything is given back.
    pub fn refund(&mut self) {
        self.used = Amount::default();
    }

    /// An engine has refused the request: the tokens are given back, the request counts.
    pub fn refund_tokens(&mut self) {
        self.used = Amount {
            requests: self.reserved.requests,
            ..Amount::default()
        };
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        let limits = &self.limits;
        let corrections = self.names.iter().filter_map(|name| {
            let limit = limits.limits.every().find(|limit| limit.name == *name)?;
            let (reserved, used) = (limit.kind.of(&self.reserved), limit.kind.of(&self.used));
            let micros = gcra::correction(&limit.rate, reserved, used);
            (micros != 0).then(|| (name.clone(), micros))
        });
        let settlement = Settlement {
            id: self.id,
            is_refund: self.used == Amount::default(),
            corrections: corrections.collect(),
        };
        limits
            .limiter
            .end(limits.tenant, &limits.usage, settlement, self.charged);
    }
}
