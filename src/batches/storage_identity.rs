//! Whether the storage of this replica is the one that all replicas share. Pure.
//!
//! The storage has a marker, an object that is named by a random id, and the store names that id. A folder that one
//! replica has for itself has no such marker, and neither has the mount point of a mount that was lost: what is missing
//! there is not gone.

use crate::ids;

/// Where markers lie.
pub(super) const MARKERS: &str = "storage/";

/// Identifies a storage, in its marker and in the store: 32 hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StorageId(String);

impl StorageId {
    pub(super) fn new(random: u128) -> Self {
        Self(format!("{random:032x}"))
    }

    /// `None`: the text is no id of a storage.
    pub(super) fn parse(text: &str) -> Option<Self> {
        ids::is_hex(text, 32).then(|| Self(text.to_owned()))
    }

    pub(super) fn as_str(&self) -> &str {
        &self.0
    }

    /// The path of its marker in the storage.
    pub(super) fn marker(&self) -> String {
        format!("{MARKERS}{}", self.0)
    }
}

/// Whether the storage of this replica is the one that the store names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum StorageIdentity {
    /// The store and the storage have not both answered yet.
    #[default]
    Unknown,
    /// It has the marker that the store names.
    Same(StorageId),
    /// It does not have this marker, which the store names.
    Another(StorageId),
}

impl StorageIdentity {
    /// What follows from the id that the store names, and from whether the storage has the marker of it. `None`: the
    /// storage did not answer.
    pub(super) fn of(named: StorageId, has_marker: Option<bool>) -> Self {
        match has_marker {
            Some(true) => Self::Same(named),
            Some(false) => Self::Another(named),
            None => Self::Unknown,
        }
    }

    /// Takes note of what was found. What was known before stays where there was no answer.
    pub(super) fn note(&mut self, found: Self) {
        if found != Self::Unknown {
            *self = found;
        }
    }

    /// The id that the store names, once that is known.
    pub(super) fn named(&self) -> Option<&StorageId> {
        match self {
            Self::Unknown => None,
            Self::Same(id) | Self::Another(id) => Some(id),
        }
    }

    pub(super) fn is_same(&self) -> bool {
        matches!(self, Self::Same(_))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_marker_that_the_store_names_makes_a_storage_the_same() {
        use StorageIdentity::{Another, Same, Unknown};
        let (a, b) = (StorageId::new(1), StorageId::new(2));
        let (same_a, another_a) = (Same(a.clone()), Another(a.clone()));
        let (same_b, another_b) = (Same(b.clone()), Another(b.clone()));
        // What was known before; what the store names; whether the storage has its marker; what is known then.
        for (before, named, has_marker, after) in [
            (&Unknown, &a, None, &Unknown),
            (&Unknown, &a, Some(true), &same_a),
            (&Unknown, &a, Some(false), &another_a),
            // The mount is lost, and comes back.
            (&same_a, &a, Some(false), &another_a),
            (&another_a, &a, Some(true), &same_a),
            // The store has lost its data, and names another storage.
            (&same_a, &b, Some(false), &another_b),
            (&another_a, &b, Some(true), &same_b),
            // Without an answer nothing changes.
            (&same_a, &a, None, &same_a),
            (&same_a, &b, None, &same_a),
            (&another_a, &a, None, &another_a),
        ] {
            let mut known = before.clone();
            known.note(StorageIdentity::of(named.clone(), has_marker));
            assert_eq!(known, *after, "{before:?}, {named:?}, {has_marker:?}");
            assert_eq!(known.is_same(), matches!(after, Same(_)));
            assert_eq!(known.named().is_none(), known == Unknown);
        }
    }

    #[test]
    fn only_ids_of_storages_are_part_of_paths() {
        let id = StorageId::new(7 << 90);
        assert_eq!(StorageId::parse(id.as_str()), Some(id.clone()));
        assert_eq!(id.marker(), format!("storage/{}", id.as_str()));
        let upper = id.as_str().to_uppercase();
        let long = format!("{}0", id.as_str());
        for text in ["", "../../etc", "notes.txt", &*upper, &*long] {
            assert_eq!(StorageId::parse(text), None, "{text}");
        }
    }
}
