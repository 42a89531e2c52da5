namespace expertd {}
