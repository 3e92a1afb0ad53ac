//! Inputs made from others: the same ones for the same number, on every machine.

/// A stream of numbers from a seed (splitmix64).
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        word ^ (word >> 31)
    }

    /// Below `end`, which is not 0.
    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    fn one_of<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.below(all.len())]
    }
}

/// Numbers at which sums, products and casts go wrong, as text.
const NUMBERS: &[&str] = &[
    "0",
    "1",
    "7",
    "8",
    "255",
    "65536",
    "2147483648",
    "4294967295",
    "4294967296",
    "9007199254740993",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "-1",
    "-9223372036854775808",
    "1e3",
    "1e400",
    "0.5",
    "1.0",
    "00",
];

/// Makes input `number` of a seed from a corpus.
pub(crate) fn mutated(
    corpus: &[Vec<u8>],
    words: &[&str],
    bytes_max: usize,
    seed: u64,
    number: u64,
) -> Vec<u8> {
    let mut random = Random::new(seed ^ number.wrapping_mul(0xD6E8_FEB8_6659_FD93));
    let mut input = random.one_of(corpus).clone();
    for _ in 0..1 << random.below(5) {
        change(&mut input, corpus, words, &mut random);
    }
    input.truncate(bytes_max);
    input
}

/// One change; several of these make an input.
fn change(input: &mut Vec<u8>, corpus: &[Vec<u8>], words: &[&str], random: &mut Random) {
    let place = random.below(input.len() + 1);
    let end = (place + 1 + random.below(16)).min(input.len());
    let place = place.min(end);
    match random.below(10) {
        0 if place < input.len() => input[place] ^= 1 << random.below(8),
        1 if place < input.len() => input[place] = random.next() as u8,
        2 => drop(input.drain(place..end)),
        3 => input.insert(place, random.next() as u8),
        4 => {
            let copied = input[place..end].to_vec();
            let target = random.below(input.len() + 1);
            input.splice(target..target, copied);
        }
        5 | 6 if words.is_empty() => {
            let end = if random.below(2) == 0 { place } else { end };
            let fresh: Vec<u8> = (0..1 + random.below(48)).map(|_| random.next() as u8).collect();
            input.splice(place..end, fresh);
        }
        5 | 6 => {
            let word = random.one_of(words).bytes();
            let end = if random.below(2) == 0 { place } else { end };
            input.splice(place..end, word);
        }
        7 => replace_number(input, place, random),
        8 => {
            let other = random.one_of(corpus);
            let from = random.below(other.len() + 1);
            let length = random.below(other.len() - from + 1).min(64);
            input.splice(place..end, other[from..from + length].iter().copied());
        }
        _ => {
            let value = random.next().to_le_bytes();
            let edge = *random.one_of(&[0, 0xFF, 0x7F, 0x80, value[0]]);
            let end = (place + 1 + random.below(8)).min(input.len());
            input[place.min(end)..end].fill(edge);
        }
    }
}

/// The first number in the text from `place` on becomes another.
fn replace_number(input: &mut Vec<u8>, place: usize, random: &mut Random) {
    let is_digit = |byte: &u8| byte.is_ascii_digit();
    let Some(start) = input[place..].iter().position(is_digit).map(|at| place + at) else { return };
    let length = input[start..].iter().take_while(|byte| is_digit(byte)).count();
    let number = random.one_of(NUMBERS).bytes();
    input.splice(start..start + length, number);
}
