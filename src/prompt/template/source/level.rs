//! How tightly an expression binds, from the loosest on.

pub(super) const ANY: u8 = 0;
pub(super) const OR: u8 = 1;
pub(super) const AND: u8 = 2;
pub(super) const NOT: u8 = 3;
pub(super) const COMPARISON: u8 = 4;
pub(super) const SUM: u8 = 5;
pub(super) const PRODUCT: u8 = 7;
pub(super) const POWER: u8 = 8;
/// A negation, or what has filters and tests.
pub(super) const FILTERED: u8 = 9;
pub(super) const NEGATED: u8 = 10;
pub(super) const PRIMARY: u8 = 11;
