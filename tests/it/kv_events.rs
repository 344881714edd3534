//! What engines tell of their caches, and what becomes of it.

mod bridged;
mod exact;
mod faults;
mod followed;
mod joins;
mod pair_ranks;
mod ranks;
mod restarts;
mod routed;
mod silence;
mod tap;
mod tiers;
mod tokenizer_check;
mod workers;

pub(crate) use self::followed::over_zmq;
