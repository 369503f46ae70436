//! The lock of a database among the connections of this process: SQLite's five states.
//!
//! ```text
//!   None ─▶ Shared ─▶ Reserved ─▶ (Pending) ─▶ Exclusive
//!            many       one: will write           one: writes, nobody reads
//! ```
//!
//! Other processes are kept out by the lock of the store.

/// State of a connection. `Pending` is that of a connection that waits for readers to finish.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub(crate) enum LockLevel {
    #[default]
    None,
    Shared,
    Reserved,
    Pending,
    Exclusive,
}

impl LockLevel {
    pub fn from_raw(level: i32) -> Self {
        match level {
            i32::MIN..=0 => Self::None,
            1 => Self::Shared,
            2 => Self::Reserved,
            3 => Self::Pending,
            4.. => Self::Exclusive,
        }
    }
}

/// Locks of all connections to a database.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct LockTable {
    /// Connections with any lock.
    holders: usize,
    /// State of the connection beyond `Shared`; `None` if there is none.
    writer: LockLevel,
}

impl LockTable {
    /// Returns true if no connection has a lock.
    pub fn is_free(&self) -> bool {
        self.holders == 0
    }

    /// Returns true if a connection has reserved the right to write.
    pub fn is_reserved(&self) -> bool {
        self.writer > LockLevel::None
    }

    /// Raises `held` to `wanted`; returns false if another connection is in the way.
    pub fn raise(&mut self, held: &mut LockLevel, wanted: LockLevel) -> bool {
        use LockLevel::{Exclusive, None, Pending, Reserved, Shared};
        if *held >= wanted {
            return true;
        }
        if *held == None {
            if self.writer >= Pending {
                return false;
            }
            self.holders = self.holders.saturating_add(1);
            *held = Shared;
        }
        if wanted == Shared {
            return true;
        }
        if *held == Shared && self.writer > None {
            return false;
        }
        let reached = match wanted {
            Exclusive if self.holders > 1 => Pending,
            Pending | Exclusive => wanted,
            _ => Reserved,
        };
        (*held, self.writer) = (reached, reached);
        reached >= wanted
    }

    /// Lowers `held` to `wanted`, which is `Shared` or `None`.
    pub fn lower(&mut self, held: &mut LockLevel, wanted: LockLevel) {
        if *held <= wanted {
            return;
        }
        if *held > LockLevel::Shared {
            self.writer = LockLevel::None;
        }
        if wanted == LockLevel::None {
            self.holders = self.holders.saturating_sub(1);
        }
        *held = wanted;
    }
}

#[cfg(test)]
mod tests {
    use super::LockLevel::{Exclusive, None, Pending, Reserved, Shared};
    use super::*;

    /// All sequences of so many steps of three connections, beside the rules as predicates.
    #[test]
    fn states_of_three_connections_keep_the_rules() {
        const STEPS: u32 = 5;
        let moves: Vec<(usize, LockLevel)> = (0..3)
            .flat_map(|who| [None, Shared, Reserved, Exclusive].map(|to| (who, to)))
            .collect();
        for mut number in 0..moves.len().pow(STEPS) {
            let (mut table, mut held) = (LockTable::default(), [None; 3]);
            for _ in 0..STEPS {
                let (who, to) = moves[number % moves.len()];
                number /= moves.len();
                let before = held;
                let others = |found: &dyn Fn(LockLevel) -> bool| {
                    (0..3).any(|other| other != who && found(before[other]))
                };
                if to <= Shared && held[who] > to {
                    table.lower(&mut held[who], to);
                    assert_eq!(held[who], to);
                } else if table.raise(&mut held[who], to) {
                    assert!(held[who] >= to);
                    match to {
                        Shared => assert!(before[who] != None || !others(&|held| held >= Pending)),
                        Reserved => assert!(!others(&|held| held >= Reserved)),
                        Exclusive => assert!(!others(&|held| held != None)),
                        _ => {}
                    }
                } else {
                    assert!(others(&|held| held >= Shared));
                }
                assert!(held.iter().filter(|held| **held >= Reserved).count() <= 1);
                assert_eq!(table.is_free(), held == [None; 3]);
                assert_eq!(table.is_reserved(), held.iter().any(|held| *held >= Reserved));
            }
        }
    }
}
