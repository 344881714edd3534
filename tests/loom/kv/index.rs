//! The index, with stand-ins for its atomics and its memory budget.

#[path = "budget.rs"]
mod budget;
mod interner;
mod lookup;
mod members;
#[path = "models.rs"]
pub mod models;
mod name_table;
mod owner_sets;
mod page_table;
mod pages;
#[path = "race_point.rs"]
mod race_point;
mod shared;
mod simd;
#[path = "sync.rs"]
mod sync;
mod tree_slots;
mod types;
mod writer;

pub use self::types::TreeBlock;
