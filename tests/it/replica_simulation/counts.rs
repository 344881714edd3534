//! How often each situation occurred.

/// How often each situation occurred: a simulation in which nothing happens proves nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub acknowledged: u64,
    pub completed: u64,
    pub failed: u64,
    pub cancelled: u64,
    /// Deleted, or lost by a store that restarted empty.
    pub gone: u64,
    /// Leases lost.
    pub lost: u64,
    /// Taken over and run again.
    pub rerun: u64,
    pub given_up: u64,
    /// Taken over to go on after the stored events.
    pub continued: u64,
    /// Answers that several replicas wrote, whole.
    pub joined: u64,
    /// Cancelled responses whose output another replica stored.
    pub outputs_kept: u64,
    /// Released by a draining replica.
    pub released: u64,
    /// Events that readers received.
    pub received: u64,
    /// Events that readers received from a replica's memory instead of the store.
    pub received_from_memory: u64,
    /// Readers that resumed on another replica.
    pub resumed: u64,
    /// Runs that stopped without a terminal event.
    pub broken: u64,
    pub steps: u64,
    /// Responses of which a failover lost writes.
    pub lost_writes: u64,
    /// Ends that a failover lost, and that must come back.
    pub lost_ends: u64,
    /// Killed replicas' runs that others had to take over in time.
    pub takeovers_on_time: u64,
    /// Responses that an owner, and not an engine, ended as failed.
    pub owner_failures: u64,
    /// Streams that were compared with the stored output.
    pub outputs_compared: u64,
    pub cancels_on_time: u64,
    /// Refused because a node of the store was down.
    pub node_refusals: u64,
    /// Responses that were gone some time after their end.
    pub expired: u64,
    /// Runs that were generated again because another turn came before theirs.
    pub new_histories: u64,
    /// Locks of a conversation that were taken up after a take-over, and that were lost.
    pub locks_resumed: u64,
    pub locks_lost: u64,
    pub locks_renewed: u64,
    /// Plain turns that were added.
    pub plain_turns: u64,
}

impl Counts {
    pub(crate) fn add(&mut self, other: &Self) {
        self.acknowledged += other.acknowledged;
        self.completed += other.completed;
        self.failed += other.failed;
        self.cancelled += other.cancelled;
        self.gone += other.gone;
        self.lost += other.lost;
        self.rerun += other.rerun;
        self.given_up += other.given_up;
        self.continued += other.continued;
        self.joined += other.joined;
        self.outputs_kept += other.outputs_kept;
        self.released += other.released;
        self.received += other.received;
        self.received_from_memory += other.received_from_memory;
        self.resumed += other.resumed;
        self.broken += other.broken;
        self.steps += other.steps;
        self.lost_writes += other.lost_writes;
        self.lost_ends += other.lost_ends;
        self.takeovers_on_time += other.takeovers_on_time;
        self.cancels_on_time += other.cancels_on_time;
        self.node_refusals += other.node_refusals;
        self.expired += other.expired;
        self.owner_failures += other.owner_failures;
        self.outputs_compared += other.outputs_compared;
        self.new_histories += other.new_histories;
        self.locks_resumed += other.locks_resumed;
        self.locks_lost += other.locks_lost;
        self.locks_renewed += other.locks_renewed;
        self.plain_turns += other.plain_turns;
    }
}
