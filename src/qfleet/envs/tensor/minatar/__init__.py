"""The five MinAtar games (Young and Tian, 2019) as tensor-native games, written from their published rules."""
