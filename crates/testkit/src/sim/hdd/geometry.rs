//! Geometry of a hard disk: positions of bytes, and seek times.
//!
//! ```text
//!   zone (outer .. inner) ─ cylinder ─ track (one for each head) ─ byte
//!   angle of a byte = skews of the tracks before it + its part of a turn
//! ```
//!
//! Angles are times: the time, in ns, from angle 0 until the byte is under the head.

use super::HddParameters;

/// Number of zones of equal width.
const ZONE_COUNT: u64 = 16;
/// A byte that passed the head this recently is not missed: times are rounded.
const ROTATION_MISS_TOLERANCE_NS: u64 = 1_000;

/// Geometry of a disk.
#[derive(Clone, Debug)]
pub(crate) struct Geometry {
    parameters: HddParameters,
    zones: Vec<Zone>,
    cylinders: u64,
    turn_ns: u64,
    /// Skew of a track's start after a switch of head or cylinder, in ns.
    head_skew_ns: u64,
    cylinder_skew_ns: u64,
    phase_ns: u64,
}

#[derive(Clone, Copy, Debug)]
struct Zone {
    first_byte: u64,
    first_cylinder: u64,
    track_bytes: u64,
}

/// Physical position of a byte.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PhysicalPosition {
    pub(crate) cylinder: u64,
    pub(crate) head: u64,
    /// Time within a rotation at which it is under the head, in ns.
    angle_ns: u64,
    track_bytes: u64,
    /// Bytes from it to the end of its track.
    rest_bytes: u64,
}

impl Geometry {
    pub(crate) fn new(parameters: &HddParameters, phase: u64) -> Self {
        let turn_ns = 60_000_000_000 / u64::from(parameters.turns_per_minute);
        let heads = u64::from(parameters.heads);
        let (outer, inner) = (parameters.outer_track_bytes, parameters.inner_track_bytes);
        let mean_bytes = (outer + inner) / 2 * heads;
        // One more per zone than the mean, so that nothing is left over.
        let per_zone = parameters.len_bytes / mean_bytes / ZONE_COUNT + 1;
        let mut zones = vec![];
        let mut first_byte = 0;
        for nth in 0..ZONE_COUNT {
            let track_bytes = outer - (outer - inner) * nth / (ZONE_COUNT - 1);
            let track_bytes = track_bytes - track_bytes % 512;
            zones.push(Zone { first_byte, first_cylinder: nth * per_zone, track_bytes });
            first_byte += per_zone * heads * track_bytes;
        }
        let mut geometry = Self {
            parameters: *parameters,
            zones,
            cylinders: per_zone * ZONE_COUNT,
            turn_ns,
            head_skew_ns: parameters.head_switch_ns + 50_000,
            cylinder_skew_ns: parameters.track_to_track_ns + 50_000,
            phase_ns: phase % turn_ns,
        };
        // The stroke ends at the last byte.
        geometry.cylinders =
            geometry.physical_position_of(parameters.len_bytes.saturating_sub(1)).cylinder + 1;
        geometry
    }

    pub(crate) fn physical_position_of(&self, byte: u64) -> PhysicalPosition {
        let nth = self.zones.partition_point(|zone| zone.first_byte <= byte) - 1;
        let zone = self.zones[nth];
        let heads = u64::from(self.parameters.heads);
        let track = (byte - zone.first_byte) / zone.track_bytes;
        let offset = (byte - zone.first_byte) % zone.track_bytes;
        let cylinder = zone.first_cylinder + track / heads;
        let head = track % heads;
        let each = (heads - 1) * self.head_skew_ns + self.cylinder_skew_ns;
        let start_ns = cylinder * each + head * self.head_skew_ns;
        PhysicalPosition {
            cylinder,
            head,
            angle_ns: (start_ns + offset * self.turn_ns / zone.track_bytes) % self.turn_ns,
            track_bytes: zone.track_bytes,
            rest_bytes: zone.track_bytes - offset,
        }
    }

    /// Returns the time of a seek from one track to another.
    pub(crate) fn seek_ns(
        &self,
        from: &PhysicalPosition,
        to: &PhysicalPosition,
        writes: bool,
    ) -> u64 {
        let it = &self.parameters;
        match from.cylinder.abs_diff(to.cylinder) {
            0 if from.head == to.head => 0,
            // To the next track a write takes as long as a read: the skew allows for it.
            0 => it.head_switch_ns,
            1 => it.track_to_track_ns,
            distance => {
                let part = distance as f64 / self.cylinders as f64;
                let curve_ns = match part < it.long_seek {
                    true => it.short_seek_ns.0 + it.short_seek_ns.1 * part.sqrt(),
                    false => it.long_seek_ns.0 + it.long_seek_ns.1 * part,
                };
                let settle_ns = if writes { it.write_settle_ns } else { 0 };
                it.track_to_track_ns.max(curve_ns as u64) + settle_ns
            }
        }
    }

    /// Returns the time until `place` is under the head, for a head on its track.
    fn rotational_latency_ns(&self, place: &PhysicalPosition, now_ns: u64) -> u64 {
        let angle_ns = (now_ns + self.phase_ns) % self.turn_ns;
        let wait_ns = (place.angle_ns + self.turn_ns - angle_ns) % self.turn_ns;
        if wait_ns + ROTATION_MISS_TOLERANCE_NS >= self.turn_ns { 0 } else { wait_ns }
    }

    /// Returns the time at which a head, now at `from`, is over `byte`.
    pub(crate) fn head_arrival_ns(
        &self,
        from: &PhysicalPosition,
        byte: u64,
        now_ns: u64,
        writes: bool,
    ) -> u64 {
        let place = self.physical_position_of(byte);
        let there_ns = now_ns + self.seek_ns(from, &place, writes);
        there_ns + self.rotational_latency_ns(&place, there_ns)
    }

    /// Returns the time at which a head that is now over `byte` has passed everything up to `end`.
    pub(crate) fn transfer_end_ns(&self, byte: u64, end: u64, now_ns: u64) -> u64 {
        self.simulate_transfer(byte, end, now_ns, u64::MAX).1
    }

    /// Returns the byte that a head, over `byte` at `now_ns`, reaches by `until_ns`: at most `end`.
    pub(crate) fn transfer_end_byte(&self, byte: u64, end: u64, now_ns: u64, until_ns: u64) -> u64 {
        self.simulate_transfer(byte, end, now_ns, until_ns).0
    }

    fn simulate_transfer(
        &self,
        mut byte: u64,
        end: u64,
        mut now_ns: u64,
        until_ns: u64,
    ) -> (u64, u64) {
        while byte < end {
            let place = self.physical_position_of(byte);
            let part = place.rest_bytes.min(end - byte);
            let takes_ns = part * self.turn_ns / place.track_bytes;
            if now_ns + takes_ns > until_ns {
                let passed = until_ns.saturating_sub(now_ns) * place.track_bytes / self.turn_ns;
                return (byte + passed / 512 * 512, until_ns);
            }
            now_ns += takes_ns;
            byte += part;
            if byte < end {
                now_ns = self.head_arrival_ns(&place, byte, now_ns, false);
            }
        }
        (byte, now_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry(len_bytes: u64) -> Geometry {
        Geometry::new(&HddParameters::desktop_7200(len_bytes), 12345)
    }

    #[test]
    fn adjacent_bytes_have_adjacent_positions() {
        for len_bytes in [64 << 20, 5 << 30, 1 << 40, 4 << 40] {
            let geometry = geometry(len_bytes);
            let mut before = geometry.physical_position_of(0);
            assert_eq!((before.cylinder, before.head), (0, 0));
            let mut byte = before.rest_bytes;
            for _ in 0..5000 {
                if byte >= len_bytes {
                    break;
                }
                let place = geometry.physical_position_of(byte);
                let next_head = (before.cylinder, before.head + 1);
                let is_next = [next_head, (before.cylinder + 1, 0)];
                assert!(is_next.contains(&(place.cylinder, place.head)), "{before:?} {place:?}");
                assert!(place.rest_bytes == place.track_bytes);
                byte += place.rest_bytes;
                before = place;
            }
            assert!(geometry.physical_position_of(len_bytes - 1).cylinder < geometry.cylinders);
        }
    }

    #[test]
    fn seek_times_match_datasheet() {
        let geometry = geometry(1 << 40);
        let at =
            |part: f64| geometry.physical_position_of((part * ((1u64 << 40) - 1) as f64) as u64);
        let full_ms = geometry.seek_ns(&at(0.0), &at(1.0), false) as f64 / 1e6;
        assert!((19.0..21.0).contains(&full_ms), "{full_ms}");
        let mut sum = 0.0;
        for i in 0..200 {
            for j in 0..200 {
                let ns =
                    geometry.seek_ns(&at(f64::from(i) / 200.0), &at(f64::from(j) / 200.0), false);
                sum += ns as f64;
            }
        }
        let mean_ms = sum / 40_000.0 / 1e6;
        assert!((7.9..8.9).contains(&mean_ms), "{mean_ms}");
    }

    #[test]
    fn transfer_bytes_and_time_are_consistent() {
        let geometry = geometry(1 << 30);
        for (byte, end) in [(0, 4096), (1 << 20, 9 << 20), (777 << 20, 779 << 20)] {
            let passed_ns = geometry.transfer_end_ns(byte, end, 1_000_000);
            assert_eq!(geometry.transfer_end_byte(byte, end, 1_000_000, passed_ns), end);
            let halfway = (1_000_000 + passed_ns) / 2;
            let passed = geometry.transfer_end_byte(byte, end, 1_000_000, halfway);
            assert!(passed < end && passed > byte + (end - byte) / 4, "{passed}");
        }
        // No rotation is lost between tracks.
        let rate = (64 << 20) as f64 / geometry.transfer_end_ns(0, 64 << 20, 0) as f64 * 1e3;
        assert!((150.0..190.0).contains(&rate), "{rate} MB/s");
    }
}
