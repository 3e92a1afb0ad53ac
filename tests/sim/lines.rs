//! What a trace is made of: words with named numbers, one a line, that are printed and read back.
//!
//! Every number is plain and any value of it means something (the reader takes it modulo what
//! there is), so that a shorter trace, or one with smaller numbers, is a trace too.

use vbar::driver::sim::Verb;

/// A field's number as it is printed: verbs by their names, which stay when a verb is added.
pub(crate) fn show(field: &str, number: u64) -> String {
    match field {
        "verb" => Verb::ALL[number as usize % Verb::COUNT].name().to_owned(),
        _ => number.to_string(),
    }
}

/// What [`show`] printed.
pub(crate) fn read(field: &str, text: &str) -> Result<u64, String> {
    if let ("verb", Ok(verb)) = (field, text.parse::<Verb>()) {
        return Ok(Verb::ALL.iter().position(|known| *known == verb).unwrap_or(0) as u64);
    }
    text.parse().map_err(|_| format!("{field}={text}: a number is expected"))
}

/// The fields of a line behind its word, by name.
pub(crate) fn fields(line: &str) -> Result<Vec<(&str, &str)>, String> {
    let pairs = line.split_whitespace().skip(1);
    let pair = |text| str::split_once(text, '=').ok_or_else(|| format!("'{text}': no field=n"));
    pairs.map(pair).collect()
}

/// An enum of lines: `Variant "word" { field, ... }`.
macro_rules! lines {
    ($(#[$meta:meta])* $name:ident {
        $($(#[$doc:meta])* $variant:ident $word:literal { $($field:ident),* },)*
    }) => {
        $(#[$meta])*
        #[derive(Clone, PartialEq, Eq, Debug)]
        pub(crate) enum $name { $($(#[$doc])* $variant { $($field: u64),* },)* }

        impl $name {
            /// Every word.
            #[allow(dead_code, reason = "not every enum's are asked for")]
            pub(crate) const WORDS: &'static [&'static str] = &[$($word),*];

            /// The line's word.
            pub(crate) fn word(&self) -> &'static str {
                match self { $(Self::$variant { .. } => $word,)* }
            }

            /// The numbers, in the order of the fields.
            pub(crate) fn numbers(&self) -> Vec<u64> {
                match self { $(Self::$variant { $($field),* } => vec![$(*$field),*],)* }
            }

            /// The same line with one number changed.
            pub(crate) fn with(&self, index: usize, value: u64) -> Self {
                let mut made = self.clone();
                let places: Vec<&mut u64> = match &mut made {
                    $(Self::$variant { $($field),* } => vec![$($field),*],)*
                };
                if let Some(place) = places.into_iter().nth(index) {
                    *place = value;
                }
                made
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.word())?;
                match self {
                    $(Self::$variant { $($field),* } => {
                        $(write!(f, " {}={}", stringify!($field),
                            $crate::lines::show(stringify!($field), *$field))?;)*
                    })*
                }
                Ok(())
            }
        }

        impl std::str::FromStr for $name {
            type Err = String;

            fn from_str(line: &str) -> Result<Self, String> {
                let fields = $crate::lines::fields(line)?;
                let mut known = 0;
                // A field that is not given is 0: what was added later is off in older traces.
                let mut number = |name: &str| -> Result<u64, String> {
                    let found = fields.iter().find(|(field, _)| *field == name);
                    known += usize::from(found.is_some());
                    found.map_or(Ok(0), |(_, text)| $crate::lines::read(name, text))
                };
                let _ = &mut number;
                let made = match line.split_whitespace().next().unwrap_or_default() {
                    $($word => Ok(Self::$variant { $($field: number(stringify!($field))?),* }),)*
                    other => Err(format!("'{other}' is no word of {}", stringify!($name))),
                }?;
                match known == fields.len() {
                    true => Ok(made),
                    false => Err(format!("'{line}': a field that is not known")),
                }
            }
        }
    };
}
pub(crate) use lines;
