//! Numbers and bytes as readers write them.

/// `1.5 GiB`.
pub fn text(bytes: u64) -> String {
    let mut value = bytes as f64;
    for unit in ["bytes", "KiB", "MiB", "GiB", "TiB"] {
        if value < 1024.0 {
            return match unit {
                "bytes" => format!("{bytes} {unit}"),
                _ => format!("{} {unit}", number(value)),
            };
        }
        value /= 1024.0;
    }
    format!("{} PiB", number(value))
}

/// Three or four significant digits.
pub fn number(value: f64) -> String {
    let decimals = match value.abs() {
        magnitude if magnitude >= 100.0 => 0,
        magnitude if magnitude >= 10.0 => 1,
        magnitude if magnitude >= 1.0 => 2,
        _ => 3,
    };
    format!("{value:.decimals$}")
}

/// `131,072`.
pub fn count(value: u64) -> String {
    let digits = value.to_string();
    let mut out = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}
