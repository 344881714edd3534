//! The load of a worker in a replay. Pure.

/// The counters of `fleet::load`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Load {
    pub(super) requests: u32,
    pub(super) queued_tokens: u64,
    /// Prompt tokens of all requests.
    pub(super) context_tokens: u64,
}

impl Load {
    /// What a decision sees: its own requests and the other replicas'.
    pub(super) fn plus(self, peers: &Load) -> Self {
        Self {
            requests: self.requests + peers.requests,
            queued_tokens: self.queued_tokens + peers.queued_tokens,
            context_tokens: self.context_tokens + peers.context_tokens,
        }
    }

    /// One more request, whose prompt is not computed.
    pub(super) fn add(&mut self, prompt_tokens: u32, uncached_tokens: u32) {
        self.requests += 1;
        self.queued_tokens += u64::from(uncached_tokens);
        self.context_tokens += u64::from(prompt_tokens);
    }

    /// Counts `now` of one replica where `before` was counted.
    pub(super) fn replace(&mut self, before: &Load, now: &Load) {
        self.requests = self.requests - before.requests + now.requests;
        self.queued_tokens = self.queued_tokens - before.queued_tokens + now.queued_tokens;
        self.context_tokens = self.context_tokens - before.context_tokens + now.context_tokens;
    }
}
