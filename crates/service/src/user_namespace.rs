//! User namespaces: user 0 of one may be an ordinary user outside.
//!
//! Law: what only the host's root can do (block devices, other users' files) is asked of
//! [`is_host_root`]. What root of any namespace can do in its mount namespace, as mount(2), is asked
//! of the user id.

use std::fs::read_to_string;

/// Returns true if this process is root of the host. Without `/proc` no user namespace is known.
pub fn is_host_root() -> bool {
    rustix::process::geteuid().is_root() && is_initial()
}

/// Returns true if this process can give up user 0 for the user and group `id`, and all groups.
pub(crate) fn can_become(id: u32) -> bool {
    let has_id = |map| read_to_string(map).is_ok_and(|map| parse_map(&map).any(|it| it.has(id)));
    let may_drop_groups = || {
        let set = read_to_string("/proc/self/setgroups");
        set.is_ok_and(|set| set.trim() == "allow")
    };
    is_initial()
        || has_id("/proc/self/uid_map") && has_id("/proc/self/gid_map") && may_drop_groups()
}

/// Returns true in the initial user namespace, which maps all users to themselves.
fn is_initial() -> bool {
    let map = read_to_string("/proc/self/uid_map");
    map.map_or(true, |map| {
        parse_map(&map).eq([MappedIds { first: 0, outside: 0, count: u32::MAX }])
    })
}

/// A line of `uid_map` or `gid_map`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MappedIds {
    first: u32,
    outside: u32,
    count: u32,
}

impl MappedIds {
    fn has(self, id: u32) -> bool {
        id.checked_sub(self.first).is_some_and(|nth| nth < self.count)
    }
}

fn parse_map(map: &str) -> impl Iterator<Item = MappedIds> {
    map.lines().filter_map(|line| {
        let mut numbers = line.split_whitespace().map(|number| number.parse().ok());
        let mut next = || numbers.next().flatten();
        Some(MappedIds { first: next()?, outside: next()?, count: next()? })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_are_parsed() {
        let map = "         0       1000          1\n         1     100000      65536\n";
        let ids: Vec<_> = parse_map(map).collect();
        assert_eq!(ids[1], MappedIds { first: 1, outside: 100_000, count: 65536 });
        assert!(ids[0].has(0) && !ids[0].has(1) && ids[1].has(65534) && !ids[1].has(65537));
        assert_eq!(parse_map("odd\n").next(), None);
    }
}
