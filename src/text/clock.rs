//! Dates as text, for templates that state the day. Owns the calendar sum; never asks for the time itself.
//! Surprising fact: the zone is UTC everywhere, since reading the local zone is not safe beside other threads.

use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
/// The first of January 1970 was a Thursday.
const WEEKDAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

/// `time` by a `strftime` pattern with %Y %y %m %d %e %B %b %A %a %H %M %S %j %%. `None` when the pattern has another directive.
pub fn format(pattern: &str, time: SystemTime) -> Option<String> {
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (year, day_of_year) = year_of(days);
    let (month, day) = month_of(year, day_of_year);
    let weekday = WEEKDAYS[(days % 7) as usize];
    let mut text = String::new();
    let mut chars = pattern.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            text.push(c);
            continue;
        }
        text += &match chars.next()? {
            'Y' => year.to_string(),
            'y' => format!("{:02}", year % 100),
            'm' => format!("{:02}", month + 1),
            'd' => format!("{day:02}"),
            'e' => format!("{day:2}"),
            'B' => MONTHS[month].to_owned(),
            'b' => MONTHS[month][..3].to_owned(),
            'A' => weekday.to_owned(),
            'a' => weekday[..3].to_owned(),
            'H' => format!("{:02}", second / 3600),
            'M' => format!("{:02}", second / 60 % 60),
            'S' => format!("{:02}", second % 60),
            'j' => format!("{:03}", day_of_year + 1),
            '%' => "%".to_owned(),
            _ => return None,
        };
    }
    Some(text)
}

fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

/// Year, and the day in it from 0, of a count of days since 1970.
fn year_of(days: u64) -> (u64, u64) {
    // 146,097 days are 400 years, after which the calendar repeats.
    let (mut year, mut rest) = (1970 + days / 146_097 * 400, days % 146_097);
    loop {
        let length = 365 + u64::from(is_leap(year));
        if rest < length {
            return (year, rest);
        }
        rest -= length;
        year += 1;
    }
}

/// Month from 0 and day from 1.
fn month_of(year: u64, day_of_year: u64) -> (usize, u64) {
    let lengths = [31, 28 + u64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut rest = day_of_year;
    for (month, length) in lengths.into_iter().enumerate() {
        if rest < length {
            return (month, rest + 1);
        }
        rest -= length;
    }
    unreachable!("a day of the year lies in one of its months")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn check(seconds: u64, expected: &str) {
        let time = UNIX_EPOCH + Duration::from_secs(seconds);
        assert_eq!(format("%Y-%m-%d %H:%M:%S %a %j", time).unwrap(), expected);
    }

    // Expectations from GNU date -u.
    #[test]
    fn known_dates() {
        check(0, "1970-01-01 00:00:00 Thu 001");
        check(951_868_799, "2000-02-29 23:59:59 Tue 060");
        check(1_709_164_800, "2024-02-29 00:00:00 Thu 060");
        check(1_735_689_599, "2024-12-31 23:59:59 Tue 366");
        check(4_107_542_400, "2100-03-01 00:00:00 Mon 060");
        check(13_569_465_600, "2400-01-01 00:00:00 Sat 001");
    }

    #[test]
    fn names_and_refusals() {
        let time = UNIX_EPOCH + Duration::from_secs(1_722_470_400);
        assert_eq!(format("%d %B %b %A %e %y 100%%", time).unwrap(), "01 August Aug Thursday  1 24 100%");
        assert_eq!(format("%Q", time), None);
        assert_eq!(format("%", time), None);
    }
}
