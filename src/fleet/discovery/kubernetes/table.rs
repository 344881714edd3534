//! The objects that the API has, by what its lists and watch events say. Pure.
//!
//! A watch may lose an event without noticing. So everything is listed again now and then, beside the running watch
//! (a *relist*). The list shows one moment and arrives later than events of that moment, so it decides only about
//! objects of which the watch said nothing since the relist began; of the others the watch knows more.

use std::collections::{BTreeMap, BTreeSet};

/// Objects by uid. `T` has its resource version, so that equal objects are the same version.
#[derive(Debug)]
pub(super) struct Table<T> {
    objects: BTreeMap<String, T>,
    /// During a relist: objects of which the watch said something since it began.
    touched: Option<BTreeSet<String>>,
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self {
            objects: BTreeMap::new(),
            touched: None,
        }
    }
}

impl<T> Table<T> {
    pub(super) fn objects(&self) -> impl Iterator<Item = &T> + Clone {
        self.objects.values()
    }

    pub(super) fn get(&self, uid: &str) -> Option<&T> {
        self.objects.get(uid)
    }

    /// The watch begins anew with a complete list: what is not in it is gone. Ends a relist.
    pub(super) fn replace(&mut self, listed: BTreeMap<String, T>) {
        self.touched = None;
        self.objects = listed;
    }

    /// The watch says that an object is there, or has changed.
    pub(super) fn apply(&mut self, uid: String, object: T) {
        self.touch(&uid);
        self.objects.insert(uid, object);
    }

    /// The watch says that an object is gone.
    pub(super) fn remove(&mut self, uid: &str) {
        self.touch(uid);
        self.objects.remove(uid);
    }

    fn touch(&mut self, uid: &str) {
        if let Some(touched) = &mut self.touched {
            touched.insert(uid.to_owned());
        }
    }

    /// The API is asked for a complete list from now on.
    pub(super) fn begin_relist(&mut self) {
        self.touched = Some(BTreeSet::new());
    }

    pub(super) fn cancel_relist(&mut self) {
        self.touched = None;
    }

    /// Takes over a complete list that was asked for after [`Self::begin_relist`]. Returns how many objects were not as
    /// listed although the watch said nothing of them: it has lost their events. Nothing happens if the relist was
    /// ended by [`Self::replace`].
    pub(super) fn finish_relist(
        &mut self,
        mut listed: BTreeMap<String, T>,
        is_same: impl Fn(&T, &T) -> bool,
    ) -> usize {
        let Some(touched) = self.touched.take() else {
            return 0;
        };
        listed.retain(|uid, _| !touched.contains(uid));
        let before = self.objects.len();
        self.objects
            .retain(|uid, _| touched.contains(uid) || listed.contains_key(uid));
        let mut lost = before - self.objects.len();
        for (uid, now) in listed {
            let known = self.objects.get(&uid);
            if !known.is_some_and(|known| is_same(known, &now)) {
                lost += 1;
                self.objects.insert(uid, now);
            }
        }
        lost
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    type Objects = BTreeMap<String, u32>;

    fn objects(rows: &[(&str, u32)]) -> Objects {
        let rows = rows.iter();
        rows.map(|(uid, version)| ((*uid).to_owned(), *version))
            .collect()
    }

    fn finish(table: &mut Table<u32>, listed: &[(&str, u32)]) -> usize {
        table.finish_relist(objects(listed), u32::eq)
    }

    #[test]
    fn a_relist_makes_up_for_every_kind_of_lost_event() {
        let mut table = Table::default();
        table.replace(objects(&[("stays", 1), ("gone", 1), ("changed", 1)]));
        table.begin_relist();
        let listed = [("stays", 1), ("changed", 2), ("new", 3)];
        assert_eq!(finish(&mut table, &listed), 3);
        assert_eq!(table.objects, objects(&listed));
    }

    #[test]
    fn what_the_watch_said_during_a_relist_is_newer_than_the_list() {
        let mut table = Table::default();
        table.replace(objects(&[("deleted", 1), ("changed", 1)]));
        table.begin_relist();
        table.remove("deleted");
        table.apply("changed".to_owned(), 3);
        table.apply("added".to_owned(), 4);
        assert_eq!(finish(&mut table, &[("deleted", 1), ("changed", 2)]), 0);
        assert_eq!(table.objects, objects(&[("changed", 3), ("added", 4)]));
    }

    #[test]
    fn a_list_that_was_overtaken_by_a_new_watch_changes_nothing() {
        let mut table = Table::default();
        table.begin_relist();
        table.replace(objects(&[("a", 2)]));
        assert_eq!(finish(&mut table, &[("b", 1)]), 0);
        table.begin_relist();
        table.cancel_relist();
        assert_eq!(finish(&mut table, &[("b", 1)]), 0);
        assert_eq!(table.objects, objects(&[("a", 2)]));
    }

    #[derive(Clone, Debug)]
    enum Step {
        /// The API's object changes, appears or goes; the watch loses the event or not.
        Change {
            uid: u8,
            is_there: bool,
            is_lost: bool,
        },
        Relist,
        List,
        Finish,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            6 => (0u8..5, any::<bool>(), proptest::bool::weighted(0.3))
                .prop_map(|(uid, is_there, is_lost)| Step::Change { uid, is_there, is_lost }),
            1 => Just(Step::Relist),
            1 => Just(Step::List),
            1 => Just(Step::Finish),
        ]
    }

    proptest! {
        /// After a relist that began after the last lost event the table is what the API has.
        #[test]
        fn a_relist_after_the_last_loss_makes_the_table_right(steps in proptest::collection::vec(step(), 0..60)) {
            let mut table = Table::default();
            let (mut api, mut listed) = (Objects::new(), None);
            let (mut version, mut is_relisting) = (0, false);
            // Objects whose events were lost, until a relist that began later has ended.
            let (mut wrong, mut wrong_before) = (BTreeSet::new(), BTreeSet::new());
            for step in steps {
                match step {
                    Step::Change { uid, is_there, is_lost } => {
                        version += 1;
                        let uid = uid.to_string();
                        if is_there {
                            api.insert(uid.clone(), version);
                        } else {
                            api.remove(&uid);
                        }
                        match (is_lost, is_there) {
                            (true, _) => drop(wrong.insert(uid)),
                            (false, true) => table.apply(uid, version),
                            (false, false) => table.remove(&uid),
                        }
                    }
                    Step::Relist => {
                        table.begin_relist();
                        (is_relisting, listed) = (true, None);
                        wrong_before = std::mem::take(&mut wrong);
                        wrong.clear();
                    }
                    Step::List => listed = is_relisting.then(|| api.clone()),
                    Step::Finish => {
                        if let Some(listed) = listed.take() {
                            table.finish_relist(listed, u32::eq);
                            is_relisting = false;
                            for (uid, version) in &api {
                                let is_right = wrong.contains(uid) || table.objects.get(uid) == Some(version);
                                prop_assert!(is_right, "{uid} after {wrong_before:?}");
                            }
                            for uid in table.objects.keys() {
                                prop_assert!(wrong.contains(uid) || api.contains_key(uid), "{uid} is gone");
                            }
                        }
                    }
                }
            }
        }
    }
}
