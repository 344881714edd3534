//! One attempt at one worker, or at a prefill and a decode worker: what is sent, what it counts for, how it ends.

pub(super) mod decode_leg;
pub(super) mod exchange;
pub(super) mod first_token;
pub(super) mod leg_context;
pub(super) mod offers;
pub(super) mod outcome;
pub(super) mod prefill_leg;
pub(super) mod running;
pub(super) mod send;
pub(super) mod single_worker;
pub(super) mod together;
pub(super) mod two_legs;
