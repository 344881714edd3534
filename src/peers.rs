//! What the replicas of one fleet share: the load that each has at the workers, the prompts that it routed, and, for a
//! replica that starts, what it knows of the workers' caches.
//!
//! Replicas share state, never events: a report that is lost, late or doubled is healed by the next one. Nothing here is
//! asked on a request's path; a replica without peers routes by what it knows itself.

pub mod wire;
