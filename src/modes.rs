//! Modes as `chmod` parses them: octal, or clauses of who, operator and permissions.
//!
//! ```text
//!   u+rwX,g=u,o-t      who: u g o a     do: + - =     permissions: r w x X s t, or u g o
//! ```

const ALL_MODE_BITS: u32 = 0o7777;
const SETUID_SETGID_BITS: u32 = 0o6000;

/// A parsed change of a mode.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ModeChange {
    /// Sets these bits; directories keep setuid and setgid unless five digits are given.
    To {
        /// Permission bits.
        bits: u32,
        /// True if setuid and setgid of directories are set too.
        whole: bool,
    },
    /// Symbolic clauses, applied in order.
    Steps(Vec<ModeClause>),
}

/// One symbolic clause.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ModeClause {
    /// Bits of the named classes; 0 if none is named.
    who: u32,
    what: ModeOp,
    permissions: PermissionSource,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ModeOp {
    Add,
    Remove,
    Set,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum PermissionSource {
    /// Bits for all classes; `search` adds `x` to directories, and to files that have any `x`.
    Bits { bits: u32, search: bool },
    /// Copy of the bits of owner, group or others, given as a shift.
    Copy { shift: u32 },
}

impl std::str::FromStr for ModeChange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || format!("{text}: not a mode such as 644, u+x or go=r");
        if text.bytes().all(|byte| byte.is_ascii_digit()) {
            let bits = u32::from_str_radix(text, 8).ok().filter(|bits| *bits <= ALL_MODE_BITS);
            return Ok(Self::To { bits: bits.ok_or_else(wrong)?, whole: text.len() > 4 });
        }
        let mut steps = vec![];
        for clause in text.split(',') {
            parse_clause(clause.as_bytes(), &mut steps).ok_or_else(wrong)?;
        }
        Ok(Self::Steps(steps))
    }
}

/// Parses the operators of one clause.
fn parse_clause(clause: &[u8], steps: &mut Vec<ModeClause>) -> Option<()> {
    let start = clause.iter().position(|byte| matches!(byte, b'+' | b'-' | b'='))?;
    let (who, mut rest) = clause.split_at(start);
    let who = who.iter().try_fold(0, |bits, who| Some(bits | class_bits(*who)?))?;
    while let Some((what, after)) = rest.split_first() {
        let what = match what {
            b'+' => ModeOp::Add,
            b'-' => ModeOp::Remove,
            _ => ModeOp::Set,
        };
        let end = after.iter().position(|byte| matches!(byte, b'+' | b'-' | b'='));
        let (letters, next) = after.split_at(end.unwrap_or(after.len()));
        steps.push(ModeClause { who, what, permissions: parse_permissions(letters)? });
        rest = next;
    }
    Some(())
}

fn class_bits(who: u8) -> Option<u32> {
    Some(match who {
        b'u' => 0o4700,
        b'g' => 0o2070,
        b'o' => 0o1007,
        b'a' => ALL_MODE_BITS,
        _ => return None,
    })
}

fn parse_permissions(letters: &[u8]) -> Option<PermissionSource> {
    if let [letter @ (b'u' | b'g' | b'o')] = letters {
        let shift = match letter {
            b'u' => 6,
            b'g' => 3,
            _ => 0,
        };
        return Some(PermissionSource::Copy { shift });
    }
    let (mut bits, mut search) = (0, false);
    for letter in letters {
        match letter {
            b'r' => bits |= 0o444,
            b'w' => bits |= 0o222,
            b'x' => bits |= 0o111,
            b'X' => search = true,
            b's' => bits |= SETUID_SETGID_BITS,
            b't' => bits |= 0o1000,
            _ => return None,
        }
    }
    Some(PermissionSource::Bits { bits, search })
}

impl ModeChange {
    /// Returns the changed mode; `umask` applies to clauses that name no class.
    pub fn apply(&self, old: u32, is_dir: bool, umask: u32) -> u32 {
        let old = old & ALL_MODE_BITS;
        match self {
            Self::To { bits, whole } if is_dir && !whole => bits | old & SETUID_SETGID_BITS,
            Self::To { bits, .. } => *bits,
            Self::Steps(steps) => {
                steps.iter().fold(old, |mode, step| step.apply(mode, is_dir, umask))
            }
        }
    }
}

impl ModeClause {
    fn apply(&self, old: u32, is_dir: bool, umask: u32) -> u32 {
        let (bits, named) = match self.permissions {
            PermissionSource::Copy { shift } => ((old >> shift & 7) * 0o111, 0),
            PermissionSource::Bits { bits, search } => {
                let execute = search && (is_dir || old & 0o111 != 0);
                (bits | if execute { 0o111 } else { 0 }, bits & SETUID_SETGID_BITS)
            }
        };
        let about = if self.who == 0 { ALL_MODE_BITS & !umask } else { self.who };
        let bits = bits & about;
        match self.what {
            ModeOp::Add => old | bits,
            ModeOp::Remove => old & !bits,
            ModeOp::Set => {
                // Directories lose setuid and setgid only if these are named.
                let kept = if is_dir { SETUID_SETGID_BITS & !named } else { 0 };
                let cleared = if self.who == 0 { ALL_MODE_BITS } else { self.who };
                old & (!cleared | kept) | bits
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Results of GNU `chmod`.
    #[test]
    fn modes_change_like_chmod() {
        for (text, old, is_dir, new) in [
            ("644", 0o4755, false, 0o644),
            ("0", 0o755, false, 0),
            ("755", 0o42700, true, 0o2755),
            ("00755", 0o42700, true, 0o755),
            ("4755", 0o644, false, 0o4755),
            ("u+x", 0o644, false, 0o744),
            ("+x", 0o644, false, 0o755),
            ("+w", 0o444, false, 0o644),
            ("a+w", 0o444, false, 0o666),
            ("go-rwx", 0o777, false, 0o700),
            ("g=u,o=", 0o751, false, 0o770),
            ("u=rw,go=r", 0o777, false, 0o644),
            ("a+X", 0o644, false, 0o644),
            ("a+X", 0o744, false, 0o755),
            ("a+X", 0o644, true, 0o755),
            ("u+s,g+s,+t", 0o755, false, 0o7755),
            ("o+s", 0o755, false, 0o755),
            ("u=rwx", 0o4644, false, 0o744),
            ("u=rwx", 0o4644, true, 0o4744),
            ("u-s", 0o4755, true, 0o755),
            ("u+r-w=x", 0o600, false, 0o100),
            ("ug=o", 0o124, false, 0o444),
        ] {
            let change: ModeChange = text.parse().unwrap();
            let found = change.apply(old, is_dir, 0o022);
            assert_eq!(found, new, "{text} of {old:o} is {new:o}, not {found:o}");
        }
    }

    /// Compares random changes with the system's `chmod`.
    #[test]
    fn results_match_chmod() {
        use std::os::unix::fs::PermissionsExt;
        let top = std::env::temp_dir().join(format!("draconis-modes-{}", std::process::id()));
        let (file, dir) = (top.join("file"), top.join("dir"));
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(&file, b"").unwrap();
        let mut random = draconis_device::Random::new(7);
        let mut below = |limit: usize| random.next_below(limit as u64) as usize;
        let mut clause = || {
            let mut text = String::new();
            let who = ["", "u", "g", "o", "a", "ug", "go", "uo"];
            text += who[below(who.len())];
            for _ in 0..1 + below(2) {
                text += ["+", "-", "="][below(3)];
                let what =
                    ["r", "w", "x", "X", "s", "t", "rw", "rwx", "u", "g", "o", "", "st", "rX"];
                text += what[below(what.len())];
            }
            (text, below(0o10000) as u32)
        };
        for _ in 0..300 {
            let ((one, old), (two, _)) = (clause(), clause());
            let text = format!("{one},{two}");
            for (path, is_dir) in [(&file, false), (&dir, true)] {
                // Some systems do not let a user set every bit.
                let mode = std::fs::Permissions::from_mode(old & !0o2000 | 0o600);
                std::fs::set_permissions(path, mode).unwrap();
                let old = std::fs::metadata(path).unwrap().permissions().mode() & ALL_MODE_BITS;
                let script = format!("umask 027; chmod -- '{text}' {}", path.display());
                let _ = std::process::Command::new("sh").args(["-c", &script]).output().unwrap();
                let new = std::fs::metadata(path).unwrap().permissions().mode() & ALL_MODE_BITS;
                let ours = text.parse::<ModeChange>().unwrap().apply(old, is_dir, 0o027);
                assert_eq!(ours, new, "{text} of {old:o}, directory {is_dir}: {ours:o}, {new:o}");
            }
        }
        std::fs::remove_dir_all(&top).unwrap();
    }

    #[test]
    fn invalid_modes_are_refused() {
        for wrong in ["", "8", "10000", "u", "u+q", "z+x", "u+x,", "u+ug", "rw"] {
            assert!(wrong.parse::<ModeChange>().is_err(), "{wrong}");
        }
    }
}
