//! Disk operations: write, take snapshots, clone, roll back, remove.

use std::sync::Arc;

use super::{ItemName, Workload, violation_while};
use crate::torture::Violation;
use draconis_objects::{Error, Group, LifetimeHint};

impl Workload {
    /// Performs one operation on disks and their snapshots.
    pub(super) fn change_disks(&mut self, nth: u32) -> Result<(), Violation> {
        let disks = self.matching_names(|name| matches!(name, ItemName::Disk(_)));
        let any = disks.get(self.dice.next_below(disks.len().max(1) as u64) as usize).cloned();
        let store = self.store();
        let new = format!("d{}-{nth}", self.dice.next_below(1 << 40));
        let (Some(ItemName::Disk(name)), choice) = (any, self.dice.next_below(10)) else {
            return self.make_disk(&new);
        };
        let bytes = self.held[&ItemName::Disk(name.clone())].clone();
        let mark = name.iter().position(|byte| *byte == b'@');
        let made = |name: String| (ItemName::Disk(name.into_bytes().into()), Some(bytes.clone()));
        let shown = String::from_utf8_lossy(&name).into_owned();
        let (done, changes) = match (choice, mark) {
            (0, _) if disks.len() < 12 => return self.make_disk(&new),
            (1, None) => {
                let made = made(format!("{shown}@{new}"));
                (store.take_snapshot(&name, new.as_bytes()), vec![made])
            }
            (2, None) => {
                let both = vec![made(format!("{shown}@{new}")), made(new.clone())];
                (store.clone_disk(&name, new.as_bytes()), both)
            }
            (1 | 2, Some(_)) => (store.clone_disk(&name, new.as_bytes()), vec![made(new.clone())]),
            (3, Some(mark)) => {
                let (disk, snapshot) = (&name[..mark], &name[mark + 1..]);
                if !self.held.contains_key(&ItemName::Disk(disk.into())) {
                    return Ok(());
                }
                let back = (ItemName::Disk(disk.into()), Some(bytes.clone()));
                (store.roll_back(disk, snapshot), vec![back])
            }
            (4, _) => return self.remove_disks(vec![ItemName::Disk(name)]),
            (_, None) => return self.write_disk(&name, &bytes),
            _ => return Ok(()),
        };
        if self.apply_if_accepted(done, changes)? {
            self.disk.record_mark(self.done.len() as u64);
        }
        Ok(())
    }

    fn make_disk(&mut self, name: &str) -> Result<(), Violation> {
        let len = 4096 * (1 + self.dice.next_below(16));
        let mut group = Group::new();
        let id = group.create(self.store().new_object(), LifetimeHint::Unknown);
        group.truncate(id, len);
        group.set_name(name.as_bytes(), id);
        let taken = self.store().submit(group, &[]).map(drop).map_err(|refused| refused.error);
        let made = (ItemName::Disk(name.as_bytes().into()), Some(vec![0; len as usize].into()));
        self.apply_if_accepted(taken, vec![made]).map(drop)
    }

    fn write_disk(&mut self, name: &Arc<[u8]>, bytes: &[u8]) -> Result<(), Violation> {
        let id = self
            .store()
            .find_named_object(name)
            .map_err(|error| violation_while("names", &error))?;
        let Some(id) = id else { return Err(Violation("a disk lost its name".into())) };
        let at = self.dice.next_below(bytes.len() as u64) as usize;
        let len = (1 + self.dice.next_below(6000) as usize).min(bytes.len() - at);
        let (mut group, mut bytes) = (Group::new(), bytes.to_vec());
        if self.dice.once_in(3) {
            group.punch_hole(id, at as u64, len as u64);
            bytes[at..at + len].fill(0);
        } else {
            let payload = self.random_payload(len as u32);
            group.write(id, at as u64, &payload);
            bytes[at..at + len].copy_from_slice(&payload);
        }
        let taken = self.store().submit(group, &[]).map(drop).map_err(|refused| refused.error);
        self.apply_if_accepted(taken, vec![(ItemName::Disk(name.clone()), Some(bytes.into()))])
            .map(drop)
    }

    /// Removes disks and snapshots, as far as no others prevent it.
    pub(super) fn remove_disks(&mut self, mut names: Vec<ItemName>) -> Result<(), Violation> {
        let mut before = usize::MAX;
        while names.len() < before {
            before = names.len();
            let mut rest = vec![];
            for disk in names {
                let ItemName::Disk(name) = &disk else { continue };
                let mut done = self.store().remove_disk(name, false);
                // The snapshot pins freed segments.
                if matches!(done, Err(Error::NoSpace { .. })) && self.kept.take().is_some() {
                    done = self.store().remove_disk(name, false);
                }
                let is_there = self
                    .store()
                    .find_named_object(name)
                    .map_err(|error| violation_while("names", &error))?;
                match done {
                    // No space for the moved bytes: the next operation finishes the removal.
                    Err(Error::NoSpace { .. }) if is_there.is_none() => {}
                    Err(Error::NoSpace { .. }) => self.usage.full += 1,
                    Err(Error::Disk(_)) => {}
                    Err(error) => return Err(violation_while("removing a disk", &error)),
                    Ok(()) => {}
                }
                if is_there.is_some() {
                    rest.push(disk);
                    continue;
                }
                self.apply_if_accepted(Ok(()), vec![(disk, None)])?;
                self.disk.record_mark(self.done.len() as u64);
            }
            names = rest;
        }
        Ok(())
    }
}
