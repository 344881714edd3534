//! Names of the call's metadata that `warmroute bridge` and its subscribers use.

/// Response metadata: the id of the engine incarnation. Only `warmroute bridge` sends it.
pub const INCARNATION_METADATA: &str = "x-warmroute-incarnation";
/// Response metadata: the rank's last sequence number when the call was answered. Batches up to it are the
/// replay, later ones are live. Only `warmroute bridge` sends it.
pub const LAST_SEQUENCE_METADATA: &str = "x-warmroute-last";
/// Request metadata: the rank to send. Only `warmroute bridge` respects it.
pub const RANK_METADATA: &str = "x-warmroute-rank";
