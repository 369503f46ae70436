//! Disk operations: write, take snapshots, clone, roll back, remove.

use std::sync::Arc;

use super::{Name, Workload, failed};
use crate::torture::Violation;
use crate::{Error, Group, Hint};

impl Workload {
    /// Performs one operation on disks and their snapshots.
    pub(super) fn change_disks(&mut self, nth: u32) -> Result<(), Violation> {
        let disks = self.names(|name| matches!(name, Name::Disk(_)));
        let any = disks.get(self.dice.below(disks.len().max(1) as u64) as usize).cloned();
        let store = self.store();
        let new = format!("d{}-{nth}", self.dice.below(1 << 40));
        let (Some(Name::Disk(name)), choice) = (any, self.dice.below(10)) else {
            return self.make_disk(&new);
        };
        let bytes = self.held[&Name::Disk(name.clone())].clone();
        let mark = name.iter().position(|byte| *byte == b'@');
        let made = |name: String| (Name::Disk(name.into_bytes().into()), Some(bytes.clone()));
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
                if !self.held.contains_key(&Name::Disk(disk.into())) {
                    return Ok(());
                }
                let back = (Name::Disk(disk.into()), Some(bytes.clone()));
                (store.roll_back(disk, snapshot), vec![back])
            }
            (4, _) => return self.remove_disks(vec![Name::Disk(name)]),
            (_, None) => return self.write_disk(&name, &bytes),
            _ => return Ok(()),
        };
        if self.taken(done, changes)? {
            self.disk.mark(self.done.len() as u64);
        }
        Ok(())
    }

    fn make_disk(&mut self, name: &str) -> Result<(), Violation> {
        let len = 4096 * (1 + self.dice.below(16));
        let mut group = Group::new();
        let id = group.create(self.store().new_object(), Hint::Unknown);
        group.truncate(id, len);
        group.name(name.as_bytes(), id);
        let taken = self.store().submit(group, &[]).map(drop).map_err(|refused| refused.error);
        let made = (Name::Disk(name.as_bytes().into()), Some(vec![0; len as usize].into()));
        self.taken(taken, vec![made]).map(drop)
    }

    fn write_disk(&mut self, name: &Arc<[u8]>, bytes: &[u8]) -> Result<(), Violation> {
        let id = self.store().named(name).map_err(|error| failed("names", &error))?;
        let Some(id) = id else { return Err(Violation("a disk lost its name".into())) };
        let at = self.dice.below(bytes.len() as u64) as usize;
        let len = (1 + self.dice.below(6000) as usize).min(bytes.len() - at);
        let (mut group, mut bytes) = (Group::new(), bytes.to_vec());
        if self.dice.once_in(3) {
            group.punch(id, at as u64, len as u64);
            bytes[at..at + len].fill(0);
        } else {
            let payload = self.payload(len as u32);
            group.write(id, at as u64, &payload);
            bytes[at..at + len].copy_from_slice(&payload);
        }
        let taken = self.store().submit(group, &[]).map(drop).map_err(|refused| refused.error);
        self.taken(taken, vec![(Name::Disk(name.clone()), Some(bytes.into()))]).map(drop)
    }

    /// Removes disks and snapshots, as far as no others prevent it.
    pub(super) fn remove_disks(&mut self, mut names: Vec<Name>) -> Result<(), Violation> {
        let mut before = usize::MAX;
        while names.len() < before {
            before = names.len();
            let mut rest = vec![];
            for disk in names {
                let Name::Disk(name) = &disk else { continue };
                let mut done = self.store().remove_disk(name, false);
                // The snapshot pins freed segments.
                if matches!(done, Err(Error::NoSpace { .. })) && self.kept.take().is_some() {
                    done = self.store().remove_disk(name, false);
                }
                let is_there = self.store().named(name).map_err(|error| failed("names", &error))?;
                match done {
                    // No space for the moved bytes: the next operation finishes the removal.
                    Err(Error::NoSpace { .. }) if is_there.is_none() => {}
                    Err(Error::NoSpace { .. }) => self.usage.full += 1,
                    Err(Error::Disk(_)) => {}
                    Err(error) => return Err(failed("removing a disk", &error)),
                    Ok(()) => {}
                }
                if is_there.is_some() {
                    rest.push(disk);
                    continue;
                }
                self.taken(Ok(()), vec![(disk, None)])?;
                self.disk.mark(self.done.len() as u64);
            }
            names = rest;
        }
        Ok(())
    }
}
